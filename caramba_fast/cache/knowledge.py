"""Knowledge: what is known of a layer's keys and values, and the transforms that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from caramba_fast.cache.statistics import MIN_TOKENS, StreamStatistics, derive, observe
from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.ops import Transform


@dataclass(frozen=True)
class Knowledge:
    """Where the constants a config asks for (center, scale) come from, by stream name.

    They come from ``key_bias`` (center alone), from ``calibration``, or from the first prompt of at least 64
    real tokens; without any of these, keys and values are stored as they are.

    Attributes:
        rotary: RoPE of the key streams that have it.
        key_bias: statistics of keys that follow from the model's weights (``k_proj.bias``).
        calibration: statistics of streams measured beforehand.
        from_prompt: whether a first prompt may set what these leave open. What is stored then depends on how
            that prompt was cut into chunks.
    """

    rotary: Mapping[str, Rotary] = field(default_factory=dict)
    key_bias: Mapping[str, StreamStatistics] = field(default_factory=dict)
    calibration: Mapping[str, StreamStatistics] = field(default_factory=dict)
    from_prompt: bool = True

    def check(self, heads: Mapping[str, int], n_kv_heads: int) -> None:
        """Raises ValueError when RoPE or statistics do not fit streams of the head_dims ``heads``."""
        problems = [
            f"rope turns dim {rope.width - 1} of {name}, whose head_dim is {heads[name]}"
            for name, rope in self.rotary.items()
            if rope.width > heads[name]
        ]
        for name, known in [*self.key_bias.items(), *self.calibration.items()]:
            if name in heads:
                problems += known.problems(name, n_kv_heads, heads[name])
            else:
                problems.append(
                    f"statistics of unknown stream {name!r}; streams are {', '.join(heads)}"
                )
        if problems:
            raise ValueError("; ".join(problems))

    def transforms(
        self,
        configs: Mapping[str, KVCacheTensorConfig],
        slots: int,
        new: Mapping[str, Tensor],
        added: Sequence[int],
        cache_leftpad: Tensor | None,
    ) -> dict[str, Transform]:
        """Transforms of the streams whose config asks for constants.

        Args:
            configs: storage of each stream.
            slots: tokens a row can have.
            new: (B, H_kv, T, D) of each stream, the first tokens of every row.
            added: how many of the T tokens of each row are real.
            cache_leftpad: (B,) leading tokens that are padding.
        """
        found = {}
        for name, config in configs.items():
            if not (config.center or config.scale):
                continue
            rotary, measured = self.rotary.get(name), self.calibration.get(name)
            if measured is None and self.from_prompt and sum(added) >= MIN_TOKENS:
                measured = _observed(new[name], added, cache_leftpad, rotary, slots)
            center = self.key_bias.get(name, measured)
            found[name] = derive(config, rotary, slots, center, measured)
        return found


def _observed(
    x: Tensor,
    added: Sequence[int],
    cache_leftpad: Tensor | None,
    rotary: Rotary | None,
    slots: int,
) -> StreamStatistics:
    t = torch.arange(x.shape[2], device=x.device).expand(x.shape[0], -1)
    real = t < torch.tensor(added, device=x.device)[:, None]
    if cache_leftpad is not None:
        t = t - cache_leftpad[:, None]
        real = real & (t >= 0)
    return observe(x, t, real, rotary, slots)
