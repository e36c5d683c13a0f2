"""What editors complete is what is taken: keyword arguments by name, beside the settings and ops they are for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from caramba_fast.config.names import names_of
from caramba_fast.infer import GenerateConfig, SpeculativeConfig, options
from caramba_fast.infer.policy_fields import CachePolicyFields
from caramba_fast.infer.run import Hooks
from caramba_fast.ops import options as of_ops
from caramba_fast.serve import Engine, EngineConfig
from caramba_fast.serve.options import EngineOptions, RequestOptions


def test_keywords_of_an_engine() -> None:
    both = {*names_of(GenerateConfig), *EngineConfig.model_fields}
    assert EngineOptions.__annotations__.keys() == both
    own = RequestOptions.__annotations__.keys() - options.CallOptions.__annotations__.keys()
    taken = inspect.signature(Engine.add_request).parameters.keys()
    assert own == taken - {"self", "prompt", "config", "overrides"}


@pytest.mark.parametrize(
    ("keywords", "settings"),
    [
        (options.GenerateOptions, GenerateConfig),
        (options.SpeculativeOptions, SpeculativeConfig),
        (options.PolicyOptions, CachePolicyFields),
    ],
)
def test_keywords_are_the_settings(keywords: Any, settings: type[BaseModel]) -> None:
    assert keywords.__annotations__.keys() == set(names_of(settings))


def test_one_call_takes_what_is_not_the_caches() -> None:
    assert options.HookOptions.__annotations__.keys() == Hooks.__dataclass_fields__.keys()
    once = options.OnceOptions.__annotations__.keys() | {"max_new_tokens"}
    assert (
        once == options.GenerateOptions.__annotations__.keys() | Hooks.__dataclass_fields__.keys()
    )
    cached = options.CacheOptions.__annotations__.keys()
    assert not cached & options.RunOptions.__annotations__.keys()
    assert (
        cached | options.CallOptions.__annotations__.keys()
        == options.GenerateOptions.__annotations__.keys()
    )


#: Arguments of a schema that are made from positional ones: of views, lengths and heads.
MADE = (
    "_codes",
    "_scales",
    "_kind",
    "_tail",
    "_sink",
    "_fit",
    "cache_seqlens",
    "n_kv_heads",
    "q",
    "q_sem",
    "q_geo",
)


@pytest.mark.parametrize(
    ("op", "keywords", "more"),
    [
        ("decode_attention", of_ops.AttentionOptions, set()),
        ("decoupled_decode_attention", of_ops.DecoupledAttentionOptions, set()),
        ("extend_attention", of_ops.ExtendOptions, {"local_window"}),
        ("decoupled_extend_attention", of_ops.DecoupledExtendOptions, {"local_window"}),
    ],
)
def test_keywords_are_those_of_the_op(op: str, keywords: Any, more: set[str]) -> None:
    import caramba_fast.ops  # noqa: F401 - registers them

    schema = getattr(torch.ops.caramba_fast, op).default._schema
    names = {argument.name for argument in schema.arguments}
    taken = {name for name in names if not name.endswith(MADE) and not name.startswith("rotate_")}
    assert keywords.__annotations__.keys() == taken | more
