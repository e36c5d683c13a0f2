"""Policy: chooses the cache for a model on a device, and how attention adapts to the cache's length."""

from caramba_fast.cache import AttentionLimits
from caramba_fast.infer.cache_choice import register_chooser
from caramba_fast.infer.decode_plan import DecodePlan, plan_for
from caramba_fast.infer.policy_fields import CachePolicyFields, DecodePlanFields
from caramba_fast.policy.candidates import bytes_per_token, cache_bytes, candidates_for, spec_with
from caramba_fast.policy.choose import NoCandidateError, choose_cache, choose_for_generator
from caramba_fast.policy.measure import Figures
from caramba_fast.policy.plan import CachePlan, CandidateRow, PlanKey
from caramba_fast.policy.plan_file import PlanFile, PlanFileError
from caramba_fast.policy.timing import StepTime, plain_step
from caramba_fast.quality.text import sample_text

register_chooser(choose_for_generator)

__all__ = [
    "AttentionLimits",
    "CachePlan",
    "CachePolicyFields",
    "CandidateRow",
    "DecodePlan",
    "DecodePlanFields",
    "Figures",
    "NoCandidateError",
    "PlanFile",
    "PlanFileError",
    "PlanKey",
    "StepTime",
    "bytes_per_token",
    "cache_bytes",
    "candidates_for",
    "choose_cache",
    "plain_step",
    "plan_for",
    "sample_text",
    "spec_with",
]
