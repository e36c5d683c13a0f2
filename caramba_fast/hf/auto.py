"""cache="auto": the cache `caramba_fast.policy` chooses for a model of transformers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from caramba_fast.hf.settings import FIELDS
from caramba_fast.policy import CachePolicyFields, choose_cache

SIZES = ("max_seq_len", "batch_size")
MEASURING = ("calibration_ids", "recall", "seed")
#: Options that only ``cache="auto"`` heeds.
POLICY_OPTIONS = (*SIZES, *MEASURING, *CachePolicyFields.model_fields)
#: Options of the cache itself, which hold for what is chosen.
KEPT = ("prefill", "calibration")


def chosen_cache(model: PreTrainedModel, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The spec the policy chooses, and the options that are left for the cache.

    Args:
        options: ``max_seq_len`` (by default the model's longest, at most 4096) and ``batch_size`` (1) of the
            cache, ``calibration_ids``, ``recall`` and ``seed`` as in `policy.choose_cache`, fields of
            `policy.CachePolicyFields`, and those of a cache.

    Raises:
        ValueError, NoCandidateError: as `choose_cache`.
    """
    from caramba_fast.hf.adapter import HuggingFaceModel  # noqa: PLC0415 - only this needs it

    kept = {name: value for name, value in options.items() if name not in POLICY_OPTIONS}
    fields = {name: options[name] for name in CachePolicyFields.model_fields if name in options}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    sizes: dict[str, Any] = {"max_seq_len": min(int(longest), 4096), "batch_size": 1}
    sizes.update({name: options[name] for name in SIZES if name in options})
    more: dict[str, Any] = {name: kept[name] for name in KEPT if name in kept}
    more.update({name: options[name] for name in MEASURING if name in options})
    more["fields"] = {name: kept[name] for name in FIELDS if name in kept}
    plan = choose_cache(HuggingFaceModel(model), CachePolicyFields(**fields), **sizes, **more)
    return plan.spec, kept
