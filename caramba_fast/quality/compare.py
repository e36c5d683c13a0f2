"""Next-token predictions through several caches, compared position by position with a baseline.

Text is teacher-forced. All caches read the same tokens chunk by chunk, and each position's distribution is reduced to a
few numbers at once, so that nothing of positions × vocabulary is kept.

Figures are computed from a `Forward`, a callable that runs tokens through a cache; `cached_forward` makes one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from caramba_fast.cache import AnyLayerShape, ModelKVCache
from caramba_fast.config import KVCacheTensorConfig, cache_configs
from caramba_fast.infer.cuda_graph import DecodeGraphs
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.session import Session
from caramba_fast.models import LanguageModel
from caramba_fast.models.identity import modules_of, settings_of
from caramba_fast.quality.identity import add_tensor, digest_of

#: Tokens of each row per forward pass; 128 is the fastest on a CPU. Figures do not depend on it.
CHUNK = 128
#: Most logits of one cache in memory: 2^25 in float32 take 128 MiB.
MOST_LOGITS = 2**25
#: Values of each tensor hashed into a model's digest, evenly spread.
VALUES = 2**16
#: Logits scored at a time: few enough for a CPU's cache, enough to fill an accelerator.
_PIECE, _PIECE_ON_ACCELERATOR = 2**17, 2**24
#: Lower bound of log probabilities: a token with -inf in both distributions would have a difference of nan.
_LEAST_LOG_P = -1e30
#: Bounds of log(q / p), so that its exponential is finite.
_LEAST_LOG_RATIO, _MOST_LOG_RATIO = -1e4, 80.0


class Forward(Protocol):
    """Runs tokens through a new cache of a given spec."""

    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of consecutive chunks of ``ids`` (B, T) int64, T positions in all.

        Chunk sizes depend on the shape of ``ids`` alone, so that several specs can be run in lockstep.
        """


class ModelForward(Forward, Protocol):
    """A `Forward` that also identifies its model, as `caramba_fast.quality.measure` needs."""

    @property
    def layout(self) -> Sequence[AnyLayerShape]:
        """What each layer caches."""

    @property
    def identity(self) -> str:
        """A string that differs between models whose figures differ."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a cache of one row, over all layers.

    Attributes:
        bytes_per_token: codes and scales of one token.
        bits_per_value: bits of codes and scales per cached number.
        cache_bytes_per_token: everything a cache of the whole context allocates (tail, sinks and unused
            slots too), divided by the context.
    """

    bytes_per_token: float
    bits_per_value: float
    cache_bytes_per_token: float


def cache_size(layout: Sequence[AnyLayerShape], spec: str, context: int) -> CacheSize:
    """Size of a cache of ``context`` tokens; allocates nothing.

    ValueError for a spec that is unknown or does not fit.
    """
    configs: dict[str, Any] = cache_configs(spec)
    cache = ModelKVCache(layout, 1, context, device="meta", **configs)
    values = sum(sum(_widths(shape).values()) for shape in layout)
    per_token = cache.bytes_per_token
    return CacheSize(per_token, 8 * per_token / values, cache.nbytes / context)


def _widths(shape: AnyLayerShape) -> dict[str, int]:
    return {name: size for name, size in vars(shape).items() if name.endswith("_dim")}


class CachedForward:
    """The `ModelForward` of a `LanguageModel`; see `cached_forward`."""

    def __init__(self, model: LanguageModel, chunk: int) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; a positive int is needed")
        self.model, self.chunk = model, chunk

    @property
    def layout(self) -> Sequence[AnyLayerShape]:
        """What each layer caches."""
        return self.model.cache_layout

    @cached_property
    def identity(self) -> str:
        """Class, cache widths, chunk, and a digest of the weights."""
        digest = hashlib.sha256()
        for module in modules_of(self.model):
            for name, value in module.state_dict().items():
                if isinstance(value, Tensor):
                    add_tensor(digest, name, value, VALUES)
        name, widths = type(self.model).__name__, _widths(self.layout[0])
        layers = f"{len(self.layout)} layers of {widths}"
        return f"{name}, {layers}, chunk {self.chunk}, {digest.hexdigest()[:16]}"

    @cached_property
    def config_digest(self) -> str:
        """16 hex digits of the model's configuration: RoPE, windows, norms."""
        return digest_of([settings_of(self.model)])

    @torch.no_grad()
    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of consecutive chunks of ``ids`` (B, T)."""
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"ids has shape {tuple(ids.shape)}; (B, T) with T >= 1 is needed")
        rows, length = ids.shape
        chunk = max(1, min(self.chunk, MOST_LOGITS // (rows * self.model.vocab_size)))
        session = new_session(
            self.model, rows, length, with_room(cache_configs(spec), chunk), prefill="stored"
        )
        yield from forced(session, ids, chunk)


def new_session(
    model: LanguageModel, rows: int, length: int, configs: Mapping[str, Any], **options: Any
) -> Session:
    """A session as generators run it, over a new cache of ``rows`` × ``length`` tokens.

    It runs without a CUDA graph, so that results do not depend on whether one can be recorded. ``options`` are other
    arguments of `ModelKVCache`.
    """
    cache = ModelKVCache(
        model.cache_layout, rows, length, device=model.device, **configs, **options
    )
    session = Session(model, lambda _: cache, DecodeGraphs(model, False), 0, length, None)
    session.go_back(cache, [TokenSequence() for _ in range(rows)])
    return session


def forced(session: Session, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Feeds ids (B, T), teacher-forced, in chunks of ``chunk`` tokens per row; yields logits (B, t, V) of each."""
    for part in ids.split(chunk, dim=1):
        yield session.verify(part.tolist(), [True] * len(ids))


def cached_forward(model: LanguageModel, chunk: int = CHUNK) -> CachedForward:
    """Runs text through a `ModelKVCache` of ``model`` with ``prefill="stored"``.

    ``chunk`` is the most tokens of each row per forward pass; fewer are taken if the vocabulary is large.
    """
    return CachedForward(model, chunk)


def with_room(configs: dict[str, KVCacheTensorConfig], chunk: int) -> dict[str, Any]:
    """The same storage with a ring that takes ``chunk`` tokens per append; attention reads the same values."""
    return {
        name: config.model_copy(update={"tail_slack": max(config.tail_slack, chunk)})
        for name, config in configs.items()
    }


@dataclass(frozen=True)
class Scores:
    """Scores of one cache's predictions, (B, N) for N predictions in each of B rows.

    Attributes:
        nll: negative log likelihood of the next token, nats, float32.
        kl: KL(baseline ‖ candidate) of the next-token distributions, nats, float32.
        accept: Σ min(p_baseline, p_candidate), float32: the probability that speculative sampling accepts a
            token drawn from the candidate (arXiv:2211.17192, theorem 3.5).
        same: whether baseline and candidate rank the same token first, bool.
        correct: whether the candidate ranks the next token first, bool.
    """

    nll: np.ndarray
    kl: np.ndarray
    accept: np.ndarray
    same: np.ndarray
    correct: np.ndarray

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, in order."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Concatenates the scores of several batches by rows."""
        return cls(*(np.concatenate([getattr(p, name) for p in parts]) for name in cls.names()))

    @property
    def shape(self) -> tuple[int, int]:
        """(B, N)."""
        rows, count = self.nll.shape
        return rows, count


@torch.no_grad()
def compare(
    forward: Forward,
    ids: Tensor,
    specs: Sequence[str],
    baseline: str = "fp16",
    positions: np.ndarray | Tensor | None = None,
) -> dict[str, Scores]:
    """Scores of each spec, and of the baseline itself, on the same tokens.

    Args:
        forward: runs tokens through a cache.
        ids: (B, T) int64 token ids, T >= 2.
        specs: caches to measure.
        baseline: the cache to compare with.
        positions: (B, N) int; the predictions to score, each given by the position of its last input token (0 to T -
            2), in any order. All T - 1 by default.

    Returns:
        scores by spec: the baseline first, then the specs in order, without duplicates.

    Raises:
        ValueError: shapes or positions that do not fit, or an unknown spec.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; (B, T) with T >= 2 is needed")
    chosen = _positions(ids, positions)
    names = list(dict.fromkeys((baseline, *specs)))
    runs = [forward(ids[:, :-1], name) for name in names]
    targets = ids.cpu().gather(1, chosen + 1).flatten()
    columns, rows = (
        chosen.flatten(),
        torch.arange(len(ids), device="cpu").repeat_interleave(chosen.shape[1]),
    )
    found = {name: torch.zeros(len(Scores.names()), len(columns), device="cpu") for name in names}
    start = 0
    for logits in runs[0]:
        stop = start + logits.shape[1]
        inside = torch.nonzero((columns >= start) & (columns < stop)).flatten()
        reference = _Reference(logits, (rows[inside], columns[inside] - start), targets[inside])
        found[baseline][:, inside] = reference.own_scores().cpu()
        for name, run in zip(names[1:], runs[1:], strict=True):
            found[name][:, inside] = reference.scores(next(run, None)).cpu()
        start = stop
    return {name: _as_scores(values, chosen.shape) for name, values in found.items()}


def _as_scores(values: Tensor, shape: torch.Size) -> Scores:
    nll, kl, accept, same, correct = (row.reshape(shape).numpy() for row in values)
    return Scores(nll, kl, accept, same > 0, correct > 0)


def _positions(ids: Tensor, positions: np.ndarray | Tensor | None) -> Tensor:
    last = ids.shape[1] - 2
    if positions is None:
        return torch.arange(last + 1, device="cpu").expand(len(ids), -1)
    chosen = torch.as_tensor(positions, dtype=torch.int64, device="cpu")
    if chosen.ndim != 2 or len(chosen) != len(ids) or not chosen.numel():
        raise ValueError(
            f"positions has shape {tuple(chosen.shape)}; ({len(ids)}, N) with N >= 1 is needed"
        )
    if int(chosen.min()) < 0 or int(chosen.max()) > last:
        raise ValueError(
            f"positions go from {int(chosen.min())} to {int(chosen.max())}; 0 to {last} is allowed"
        )
    return chosen


class _Reference:
    """The baseline's distributions at the chosen positions of one chunk, (n, V).

    ``logits`` are (B, t, V), ``at`` row and column of each position, ``targets`` the tokens that follow, (n,) each.
    """

    def __init__(self, logits: Tensor, at: tuple[Tensor, Tensor], targets: Tensor) -> None:
        self.shape, device = logits.shape, logits.device
        self.rows, self.columns = (index.to(device) for index in at)
        self.targets = targets.to(device)
        picked = logits[self.rows, self.columns].to(torch.float32)
        self.top = picked.argmax(-1)
        log_p = picked.log_softmax(-1)
        self.nll = -log_p.gather(-1, self.targets[:, None])[:, 0]
        self.log_p = log_p.clamp_(min=_LEAST_LOG_P)
        self.p = self.log_p.exp()
        piece = _PIECE if device.type == "cpu" else _PIECE_ON_ACCELERATOR
        self.step = max(1, piece // logits.shape[-1])

    def own_scores(self) -> Tensor:
        """(5, n): scores of the baseline against itself."""
        ones = torch.ones_like(self.nll)
        correct = (self.top == self.targets).to(ones.dtype)
        return torch.stack((self.nll, torch.zeros_like(ones), ones, ones, correct))

    def scores(self, logits: Tensor | None) -> Tensor:
        """(5, n): scores of a candidate, from its logits (B, t, V) of the same chunk."""
        if logits is None or logits.shape != self.shape:
            found = "none" if logits is None else tuple(logits.shape)
            raise ValueError(
                f"a forward gave logits of shape {found} where the baseline has {tuple(self.shape)}; all "
                "specs must be cut alike"
            )
        count = len(self.targets)
        starts = range(0, count, self.step)
        parts = [self._piece(logits, slice(start, start + self.step)) for start in starts]
        return torch.cat(parts, 1) if parts else self.nll.new_empty(5, 0)

    def _piece(self, logits: Tensor, span: slice) -> Tensor:
        """Scores of a slice of positions.

        With d = log(q / p), KL is computed as Σ p (exp(d) - 1 - d), since Σ p = Σ q = 1. No term is negative, and an
        error in a normalization constant enters only squared, so that tiny KLs are exact too. Where d is beyond its
        bound, p exp(d) is q itself.
        """
        x = logits[self.rows[span], self.columns[span]].to(torch.float32)
        targets, p = self.targets[span], self.p[span]
        total = x.logsumexp(-1, keepdim=True)
        nll = (total - x.gather(-1, targets[:, None]))[:, 0]
        top = x.argmax(-1)
        ratio = x.sub_(total) - self.log_p[span]
        beyond = ratio > _MOST_LOG_RATIO
        change = torch.expm1(ratio.clamp_(_LEAST_LOG_RATIO, _MOST_LOG_RATIO))
        kl = torch.linalg.vecdot(p, torch.sub(change, ratio, out=ratio))
        if beyond.any():
            kl += ((x.exp() - p * change) * beyond).sum(-1)
        accept = 1 + torch.linalg.vecdot(p, change.clamp_(max=0))
        same, correct = (top == self.top[span]).float(), (top == targets).float()
        return torch.stack((nll, kl, accept, same, correct))
