"""Calibration: statistics of every stream of every layer of a model, kept in a file.

Made by `caramba_fast.calibrate`; a `ModelKVCache` given one takes its transforms from it instead of from the
first prompt. The file is a safetensors file with ``layers.<i>.<stream>.<mean|std|diversity>``.

`LayerCalibration` is what is known of one layer's keys and values, from such a file or from elsewhere, and gives the
transforms that follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.statistics import StreamStatistics, observe
from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.config.files import check_replaceable, parse_json, replacing, shown
from caramba_fast.ops import Transform

FORMAT = "caramba_fast.calibration"
VERSION = 1
#: A calibration's header is a few hundred bytes a layer; a longer one is of something else.
_MOST_HEADER = 8 * 2**20
PARTS = ("mean", "std", "diversity")


class CalibrationError(ValueError):
    """A calibration that cannot be used, and why."""


@dataclass(frozen=True)
class Calibration:
    """Statistics by layer and stream.

    Attributes:
        layers: for each layer, the statistics of its streams ("k" and "v", or "k_sem", "k_geo", "v").
        about: what it was made from, in words; kept in the file.
    """

    layers: Sequence[dict[str, StreamStatistics]]
    about: dict[str, str] = field(default_factory=dict)

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Writes the file whole or not at all.

        Args:
            path: a new file, or a calibration to replace.
            force: replace a file of any kind.

        Raises:
            FileExistsError: a file that is no calibration is there, such as a model's weights.
            OSError: the folder does not exist, is full or cannot be written.
        """
        from safetensors.torch import save  # noqa: PLC0415 - only files need it

        check_replaceable(path, "calibration", is_calibration, force=force)
        tensors = {
            f"layers.{index}.{stream}.{part}": getattr(found, part).to(
                "cpu", torch.float32, copy=True
            )
            for index, layer in enumerate(self.layers)
            for stream, found in layer.items()
            for part in PARTS
        }
        tokens = [{name: found.tokens for name, found in layer.items()} for layer in self.layers]
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "tokens": json.dumps(tokens),
            "about": json.dumps(self.about),
        }
        content = save(tensors, metadata=metadata)
        with replacing(path) as stream:
            stream.write(content)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads a file `save` wrote.

        Raises:
            CalibrationError: no such file, a damaged one, or one of another kind or version.
        """
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415

        if not Path(path).is_file():
            raise CalibrationError(f"{path} does not exist; caramba_fast.calibrate makes one")
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                _check_header(metadata, path)
                layers = [
                    {
                        stream: _statistics(file, f"layers.{index}.{stream}", count)
                        for stream, count in streams.items()
                    }
                    for index, streams in enumerate(parse_json(metadata["tokens"], finite=True))
                ]
                about = dict(parse_json(metadata.get("about", "{}")))
        except CalibrationError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(
                f"{path} cannot be read as a calibration: {str(error)[:300]}"
            ) from error
        return cls(layers, about)


def is_calibration(path: str | Path) -> bool:
    """Whether a file says that it is a calibration; it may be damaged, or of another version."""
    try:
        with Path(path).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(min(length, _MOST_HEADER)))
    except ValueError:
        return False
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(metadata, dict) and metadata.get("format") == FORMAT


def _check_header(metadata: dict[str, str], path: str | Path) -> None:
    if metadata.get("format") != FORMAT:
        raise CalibrationError(f"{path} is a safetensors file, but no calibration")
    if metadata.get("version") != str(VERSION):
        raise CalibrationError(
            f"{path} is a calibration of version {shown(metadata.get('version'))}; version {VERSION} is read"
        )


def _statistics(file: Any, name: str, tokens: Any) -> StreamStatistics:
    mean, std, diversity = (file.get_tensor(f"{name}.{part}") for part in PARTS)
    if type(tokens) is not int or not 0 <= tokens < 2**63:
        raise ValueError(f"{name} is of {shown(tokens)} tokens; a whole number is needed")
    shapes = mean.ndim == 2 and mean.shape == std.shape and diversity.ndim == 0
    if not shapes or {mean.dtype, std.dtype, diversity.dtype} != {torch.float32}:
        raise ValueError(
            f"{name} needs a mean and a std of one (heads, dim), and a number, in float32"
        )
    if bool(mean.isnan().any() | std.isnan().any() | diversity.isnan()):
        raise ValueError(f"{name} holds NaN")
    return StreamStatistics(mean, std, diversity, tokens)


@dataclass(frozen=True)
class LayerCalibration:
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
        return {}


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
