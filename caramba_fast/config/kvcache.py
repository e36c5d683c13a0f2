"""What one cached tensor (K or V of a layer) is stored as."""

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


#: Settings of earlier versions, which took constants from a prompt, a calibration or the weights.
REMOVED = frozenset(("center", "scale"))


def removed(name: str) -> str:
    """What to say of a setting that there is no more."""
    return (
        f"{name!r} is no setting any more: keys by channel ('q8', 'q4' and 'nf4' store them so) hold what it was for "
        "without constants; leave it out"
    )


class KVCacheTensorConfig(BaseModel):
    """Storage of one cached tensor.

    Attributes:
        kind: storage kind or its name.
        qblock: values that share a scale, 32, 64 or 128; must divide the lane width. By channel the tokens of a
            group, of which pages hold whole ones.
        rotate: store in the basis of a Walsh-Hadamard transform over head_dim (exact, undone by
            attention); spreads outlier channels.
        fit: how a block's scale is chosen: "amax", GGML's and QLoRA's rule, from its largest
            value; "mse", the one of least squared error among scales near it. Storage is the same. In q4_channel
            the two channels of a byte divide its bits with "mse", for least squared error of scores
            (docs/formats.md); q8_channel has one way.
        residual_len: keys less than this many tokens behind a query are read in fp16, from a ring
            beside the codes; the same for all tensors of a layer. 0 for none. By channel whole groups are, until
            their last token is so far behind.
        tail_slack: further tokens the ring holds, so that up to this many can be verified or cropped
            at once without losing any.
        sink_len: the first tokens of a row are read in fp16 as well; the same for all tensors of a layer.
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
        """Whether two channels share the bits of a byte by what each needs."""
        form = self.kind.storage
        return form.by_channel and form.bits == 4 and self.fit == "mse"

    @property
    def group(self) -> int:
        """Tokens that are encoded together: of a group by channel, else 1."""
        return self.qblock if self.kind.storage.by_channel else 1


def ring_size(configs: Iterable[KVCacheTensorConfig]) -> int:
    """Tokens the fp16 rings of a layer hold; 0 where it needs none.

    A ring has what the oldest of tail_slack queries reads: residual_len tokens, and by channel the rest of the group
    that the oldest of them is in, or the tokens of the group that is not full.
    """
    streams = list(configs)
    residual, slack = streams[0].residual_len, streams[0].tail_slack
    group = math.lcm(*(config.group for config in streams))
    if group > 1:
        return residual + slack + group
    return residual + slack if residual else 0
