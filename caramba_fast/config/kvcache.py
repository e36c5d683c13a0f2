"""How one cached tensor (K or V of a layer) is stored."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from caramba_fast.formats import ALIASES, BLOCK_SIZES, KIND_NAMES, Format, resolve


class KVCacheKind(str, Enum):
    """Storage kinds; ``KVCacheKind("q8")`` and ``KVCacheKind("q4")`` are accepted aliases."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    NF4 = "nf4"
    Q8_CHANNEL = "q8_channel"
    Q4_CHANNEL = "q4_channel"

    @classmethod
    def _missing_(cls, value: object) -> KVCacheKind:
        name = value.lower() if isinstance(value, str) else value
        if isinstance(name, str):
            name = ALIASES.get(name, name)
            for member in cls:
                if member.value == name:
                    return member
        raise ValueError(f"unknown cache kind {value!r}; known kinds are {', '.join(KIND_NAMES)}")

    @property
    def storage(self) -> Format:
        """The row of the format table."""
        return resolve(self.value)


#: Removed settings of earlier versions, which derived constants from a prompt, a calibration or the weights.
REMOVED = frozenset(("center", "scale"))


def removed(name: str) -> str:
    """Error message for a removed setting."""
    return (
        f"{name!r} is no setting any more: keys by channel ('q8', 'q4' and 'nf4' store them so) hold what it was for "
        "without constants; leave it out"
    )


class KVCacheTensorConfig(BaseModel):
    """Storage of one cached tensor.

    Attributes:
        kind: storage kind or its name.
        qblock: values that share a scale, 32, 64 or 128; must divide the lane width. For per-channel kinds the tokens
            per group; the page size must be a multiple of it.
        rotate: store in the basis of a Walsh-Hadamard transform over head_dim (exact, undone by attention), which
            spreads outlier channels.
        fit: how a block's scale is chosen: "amax", the rule of GGML and QLoRA, from its largest value; "mse", the scale
            of least squared error among candidates near that. The storage layout is the same. In q4_channel "mse" lets
            the two channels of a byte divide its bits, for least squared error of scores (docs/formats.md); q8_channel
            has only one way.
        residual_len: keys at a distance of less than this many tokens before a query are read in fp16, from a ring
            besides the codes; the same for all tensors of a layer. 0 for none. Per-channel kinds read whole groups in
            fp16, until their last token is that far away.
        tail_slack: additional tokens in the ring, so that up to this many can be verified (speculative decoding) or
            cropped at once without loss; the same for all tensors of a layer.
        sink_len: number of first tokens of a row that are also read in fp16; the same for all tensors of a layer.

    Raises:
        ValidationError: (a ValueError) an unknown field or kind, or a value that is not allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: KVCacheKind = KVCacheKind.FP16
    qblock: int = Field(default=32)
    rotate: bool = False
    fit: Literal["amax", "mse"] = "amax"
    residual_len: int = Field(default=0, ge=0)
    tail_slack: int = Field(default=32, ge=1)
    sink_len: int = Field(default=0, ge=0)

    @field_validator("kind", mode="before")
    @classmethod
    def _kind_by_name(cls, value: object) -> KVCacheKind:
        return KVCacheKind(value)

    @model_validator(mode="before")
    @classmethod
    def _no_constants(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in REMOVED & given.keys():
                raise ValueError(removed(name))
        return given

    @field_validator("qblock")
    @classmethod
    def _known_block(cls, value: int) -> int:
        if value not in BLOCK_SIZES:
            raise ValueError(f"qblock is {value}; allowed are {', '.join(map(str, BLOCK_SIZES))}")
        return value

    @property
    def divides_bytes(self) -> bool:
        """Whether two channels divide the bits of a byte according to need (q4_channel with fit "mse")."""
        form = self.kind.storage
        return form.by_channel and form.bits == 4 and self.fit == "mse"

    @property
    def group(self) -> int:
        """Tokens that are encoded together: the group size of per-channel kinds, else 1."""
        return self.qblock if self.kind.storage.by_channel else 1


def ring_size(configs: Iterable[KVCacheTensorConfig]) -> int:
    """Tokens that the fp16 rings of a layer hold; 0 if it needs none.

    A ring holds what the oldest of tail_slack queries reads: residual_len tokens and, for per-channel kinds, the rest
    of the group of the oldest of these tokens, or the tokens of the incomplete group.
    """
    streams = list(configs)
    residual, slack = streams[0].residual_len, streams[0].tail_slack
    group = math.lcm(*(config.group for config in streams))
    if group > 1:
        return residual + slack + group
    return residual + slack if residual else 0
