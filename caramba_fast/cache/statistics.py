"""What is known of a stream's values, and the transform that follows from it.

`StreamStatistics` come from a model's key biases, from calibration text (`caramba_fast.calibrate`) or from
the first prompt a cache sees (`caramba_fast.cache.calibration`). `derive` turns them into the constants of
`caramba_fast.ops.Transform`:

    center   keys lose the bias of up to MAX_PAIRS RoPE pairs a kv head, where it outweighs what varies,
             and the mean of dims without RoPE
    scale    channels several times larger than the head's median are divided by how much larger

Text that says the same thing over and over (a repeated line) tells little about text to come. How much a
sample tells is its participation ratio, (tr C)² / tr C² of the correlation matrix C of the channels: about
the number of directions the tokens vary in. Below FULL_DIVERSITY only what stands out more counts, below
MIN_DIVERSITY the stream is left as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.ops import Transform, phase_table
from caramba_fast.ops.transform import PHASE_TILE, phases_at

#: Real tokens a prompt needs before constants are taken from it.
MIN_TOKENS = 64
FULL_DIVERSITY, MIN_DIVERSITY = 12.0, 4.0
#: Most tokens that are looked at over all rows, evenly spaced.
SAMPLED_TOKENS = 2048
COMPARED_TOKENS = 256
#: Phase tables kept for further layers and caches, a few hundred KiB each.
KEPT_TABLES = 16
#: Pairs of a kv head that are centered at most, those whose bias stands out most.
MAX_PAIRS = 4
#: A pair is centered where its bias exceeds this many times what varies, its own and the median pair's.
CENTER_RATIO = 1.0
#: A channel or pair is scaled where its rms exceeds this many medians; and by no more than the limit.
SCALE_RATIO, SCALE_LIMIT = 3.0, 64.0


@dataclass(frozen=True)
class StreamStatistics:
    """First and second moments of one stream, per kv head; keys before RoPE.

    Attributes:
        mean: (H_kv, D) float32.
        std: (H_kv, D) float32, the deviation from the mean.
        diversity: () float32, the participation ratio of the sample.
        tokens: how many tokens were seen.
    """

    mean: Tensor
    std: Tensor
    diversity: Tensor
    tokens: int

    @classmethod
    def exact(cls, mean: Tensor, std: Tensor) -> StreamStatistics:
        """Statistics known without a sample, from the model's weights."""
        return cls(mean.float(), std.float(), torch.tensor(torch.inf), 0)

    @property
    def caution(self) -> Tensor:
        """Scalar: what thresholds are multiplied with; 1 for a sample that tells enough, inf for one
        that tells nothing."""
        caution = (FULL_DIVERSITY / self.diversity.clamp(min=1e-30)).clamp(min=1.0)
        return torch.where(self.diversity >= MIN_DIVERSITY, caution, torch.inf)

    def to(self, device: torch.device | str) -> StreamStatistics:
        """The same figures on another device."""
        mean, std, diversity = (x.to(device) for x in (self.mean, self.std, self.diversity))
        return StreamStatistics(mean, std, diversity, self.tokens)

    def problems(self, name: str, heads: int, dim: int) -> list[str]:
        """What does not fit a stream of ``heads`` kv heads of ``dim``."""
        wanted = {"mean": (heads, dim), "std": (heads, dim), "diversity": ()}
        return [
            f"statistics of {name}: {part} is {tuple(getattr(self, part).shape)}; {shape} is needed"
            for part, shape in wanted.items()
            if tuple(getattr(self, part).shape) != shape
        ]


_phases: dict[tuple[Rotary, int], Tensor] = {}


def full_phases(rotary: Rotary, slots: int) -> Tensor:
    """(1, pairs, 128 + tiles, 2) on the CPU: the phase table of every RoPE pair, the same for all layers."""
    key = (rotary, slots)
    if key in _phases:
        return _phases[key]
    made = phase_table(torch.tensor([rotary.inv_freq], dtype=torch.float64), slots)
    if type(made) is Tensor:  # one made while tracing is not for later use
        while len(_phases) >= KEPT_TABLES:
            _phases.pop(next(iter(_phases)))
        _phases[key] = made
    return made


def before_rope(x: Tensor, t: Tensor, rotary: Rotary, slots: int) -> Tensor:
    """x (B, H, N, D) float32, keys at tokens t (B, N) -> the same without their rotation."""
    cos, sin = phases_at(full_phases(rotary, slots).to(x.device), t)  # (B, 1, pairs, N)
    cos, sin = cos.transpose(2, 3), sin.transpose(2, 3)
    dims = torch.tensor(rotary.pairs, device=x.device)
    first, second = x[..., dims[:, 0]], x[..., dims[:, 1]]
    out = x.clone()
    out[..., dims[:, 0]] = first * cos + second * sin
    out[..., dims[:, 1]] = second * cos - first * sin
    return out


def observe(
    x: Tensor, t: Tensor, real: Tensor, rotary: Rotary | None, slots: int
) -> StreamStatistics:
    """Statistics of tokens as a cache receives them.

    Args:
        x: (B, H_kv, N, D), any float dtype.
        t: (B, N) tokens since the row's first real one.
        real: (B, N) bool, which tokens count.
        rotary: the stream's RoPE, or None.
        slots: tokens a row can have.
    """
    most = max(MIN_TOKENS, SAMPLED_TOKENS // x.shape[0])
    if x.shape[2] > most:
        index = torch.linspace(0, x.shape[2] - 1, most, device=x.device).round().long()
        x, t, real = x[:, :, index], t[:, index], real[:, index]
    x = x.float()
    if rotary is not None:
        x = before_rope(x, t, rotary, slots)
    weight = real[:, None, :, None].float()
    count = weight.sum().clamp(min=1)
    x = torch.where(weight > 0, x, 0.0)
    mean = x.sum((0, 2)) / count
    centered = (x - mean[:, None]) * weight
    std = (centered.square().sum((0, 2)) / count).sqrt()
    size = (mean.square() + std.square()).mean(-1, keepdim=True).sqrt()
    varies = std > 1e-3 * size
    unit = torch.where(varies[:, None], centered / torch.where(varies, std, 1.0)[:, None], 0.0)
    return StreamStatistics(mean, std, participation(unit), real.numel())


def participation(unit: Tensor) -> Tensor:
    """(tr C)² / tr C² of the channels' correlations over all kv heads, from unit (B, H, N, D); a scalar.

    tokens x tokens has the same traces as channels x channels, and is the smaller matrix.
    """
    rows = unit.transpose(1, 2).flatten(0, 1).flatten(1)  # (B * N, H * D)
    rows = rows[:: -(-len(rows) // COMPARED_TOKENS)]
    gram = torch.matmul(rows, rows.T)
    energy = gram.square().sum()
    return torch.where(energy > 0, gram.trace().square() / energy.clamp(min=1e-30), 0.0)


def derive(
    config: KVCacheTensorConfig,
    rotary: Rotary | None,
    slots: int,
    center: StreamStatistics | None,
    scale: StreamStatistics | None,
) -> Transform:
    """The transform ``config`` asks for.

    Args:
        config: which of center, scale and rotate are wanted.
        rotary: the stream's RoPE, or None.
        slots: tokens the phases must cover.
        center: where the biases are taken from, or None to leave keys uncentered.
        scale: where the factors are taken from, or None to leave them out.
    """
    found = Transform(rotate=config.rotate)
    removed: Tensor | None = None
    if config.center and center is not None:
        found, removed = _centered(found, rotary, slots, center)
    if config.scale and scale is not None:
        found = replace(found, scale=_factors(scale, rotary, removed))
    return found


def _centered(
    transform: Transform, rotary: Rotary | None, slots: int, seen: StreamStatistics
) -> tuple[Transform, Tensor]:
    """The transform that takes out what is constant, and that vector (H_kv, D), before RoPE."""
    whole = torch.where(seen.caution.isfinite(), seen.mean, 0.0)
    if rotary is None:
        return _less(transform, whole), whole
    dims = torch.tensor(rotary.pairs, device=whole.device)  # (pairs, 2)
    amplitude = seen.mean[:, dims].norm(dim=-1)
    varying = seen.std[:, dims].norm(dim=-1)
    typical = torch.hypot(amplitude, varying).median(-1, keepdim=True).values
    ratio = amplitude / torch.maximum(varying, typical).clamp(min=1e-30)
    ratio, index = ratio.topk(min(MAX_PAIRS, len(dims)), dim=-1)
    pairs = dims[index]  # (H, P, 2)
    bias = seen.mean.gather(-1, pairs.flatten(1)).view(pairs.shape)
    bias = torch.where((ratio > CENTER_RATIO * seen.caution)[..., None], bias, 0.0)
    phases = full_phases(rotary, slots).to(whole.device)[0][index]
    removed = torch.zeros_like(whole).scatter(-1, pairs.flatten(1), bias.flatten(1))
    on_rope = torch.zeros_like(whole, dtype=torch.bool)
    on_rope[:, dims.flatten()] = True
    rest = torch.where(on_rope, 0.0, whole)
    if on_rope.all():
        return _biased(transform, bias, pairs, phases), removed
    return _less(_biased(transform, bias, pairs, phases), rest), removed + rest


def _biased(transform: Transform, bias: Tensor, pairs: Tensor, phases: Tensor) -> Transform:
    """With the pairs in use; where that can be known without asking a device, no others."""
    used = bias.shape[1]
    if bias.device.type == "cpu":  # the pairs that stand out most come first
        used = int((bias != 0).any(-1).sum(-1).max())
    if used == 0:
        return transform
    return replace(
        transform,
        bias=bias[:, :used].contiguous(),
        pairs=pairs[:, :used].to(torch.int32).contiguous(),
        phases=phases[:, :used].contiguous(),
    )


def _less(transform: Transform, mean: Tensor) -> Transform:
    """With a mean to take out, but for one known to be zero."""
    known_zero = mean.device.type == "cpu" and not bool(mean.any())
    return transform if known_zero else replace(transform, mean=mean)


def _factors(seen: StreamStatistics, rotary: Rotary | None, removed: Tensor | None) -> Tensor:
    """(H_kv, D) float32: 1, or how many times larger than the median a channel or pair is."""
    constant = seen.mean if removed is None else seen.mean - removed
    power = constant.square() + seen.std.square()
    if rotary is not None:
        dims = torch.tensor(rotary.pairs, device=power.device)
        shared = power[:, dims].mean(-1)
        power = power.scatter(
            -1, dims.flatten().expand(len(power), -1), shared.repeat_interleave(2, dim=-1)
        )
    rms = power.sqrt()
    factor = rms / rms.median(-1, keepdim=True).values.clamp(min=1e-30)
    wanted = factor > SCALE_RATIO * seen.caution
    return torch.where(wanted, factor.clamp(max=SCALE_LIMIT), 1.0)


def lengthened(transform: Transform, rotary: Rotary | None, slots: int) -> Transform:
    """The same constants with phases for ``slots`` tokens."""
    phases = transform.phases
    if phases is None or phases.shape[2] >= PHASE_TILE + slots // PHASE_TILE:
        return transform
    table = full_phases(_needed(rotary), slots)[0][_places(transform, rotary)]
    return replace(transform, phases=table.to(phases.device))


def turned(transform: Transform, rotary: Rotary | None, count: int) -> Transform:
    """The constants of the same stored keys, where token t is called ``t - count``.

    Raises:
        ValueError: a bias on channels that ``rotary`` does not turn.
    """
    bias = transform.bias
    if bias is None or not count:
        return transform
    frequencies = torch.tensor(_needed(rotary).inv_freq, dtype=torch.float64)
    angle = torch.remainder(frequencies[_places(transform, rotary)] * count, 2 * math.pi)
    first, second = bias.double().cpu().unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    moved = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return replace(transform, bias=moved.to(bias))


def _needed(rotary: Rotary | None) -> Rotary:
    if rotary is None:
        raise ValueError(
            "a bias that was set by hand, without RoPE, cannot be moved: reset() first"
        )
    return rotary


def _places(transform: Transform, rotary: Rotary | None) -> Tensor:
    """(H_kv, P): which of the pairs of ``rotary`` each pair of the transform is."""
    assert transform.pairs is not None
    place = {dims: index for index, dims in enumerate(_needed(rotary).pairs)}
    pairs = [[(a, b) for a, b in head] for head in transform.pairs.tolist()]
    strange = {pair for head in pairs for pair in head} - place.keys()
    if strange:
        raise ValueError(f"the bias is on pairs of channels that RoPE does not turn: {strange}")
    return torch.tensor([[place[pair] for pair in head] for head in pairs])
