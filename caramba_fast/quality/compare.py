"""Next-token predictions through several caches, compared position by position with a baseline.

Text is teacher-forced: whatever a cache predicts, the next token fed is that of the text. All caches read the same
tokens in turn, chunk by chunk, and each position's distribution is reduced to a few numbers at once, so that nothing
as large as positions × vocabulary is kept.

Figures are computed from a `Forward`, a callable, and never see a model: whatever can run tokens through a cache can
be measured. `cached_forward` makes one of a model and the session that generators run.
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

#: Tokens of each row computed at once; 128 is the fastest on a CPU. Figures do not depend on it.
CHUNK = 128
#: Logits held of one cache at a time: 2^25 float32 take 128 MiB.
MOST_LOGITS = 2**25
#: Values of each tensor that go into a model's digest, evenly spread.
VALUES = 2**16
#: Logits worked on at a time: what stays in a CPU's cache, and what fills an accelerator.
_PIECE, _PIECE_ON_ACCELERATOR = 2**17, 2**24
#: Tokens a model never gives have log probability -inf, whose difference would be nan.
_LEAST_LOG_P = -1e30
#: Bounds of a log ratio of probabilities, so that its exponential is finite. A ratio beyond them needs a
#: probability of the baseline that is 0 in float32.
_LEAST_LOG_RATIO, _MOST_LOG_RATIO = -1e4, 80.0


class Forward(Protocol):
    """Runs tokens through a new cache stored as a spec says."""

    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        """Logits (B, t, V) of consecutive stretches of ``ids`` (B, T) int64, T positions in all.

        How T is cut into stretches depends on the shape of ``ids`` alone, so that several specs can be
        advanced in step.
        """


class ModelForward(Forward, Protocol):
    """A `Forward` that also says what model it runs, as `caramba_fast.quality.measure` needs."""

    @property
    def layout(self) -> Sequence[AnyLayerShape]:
        """What each layer caches."""

    @property
    def identity(self) -> str:
        """Text that differs between models whose figures differ."""


@dataclass(frozen=True)
class CacheSize:
    """What a cache of one row takes, over all layers.

    Attributes:
        bytes_per_token: codes and scales of one token.
        bits_per_value: the same for each cached number.
        cache_bytes_per_token: everything a cache of the whole context allocates (tail, sinks and unused
            slots too), divided by the context.
    """

    bytes_per_token: float
    bits_per_value: float
    cache_bytes_per_token: float


def cache_size(layout: Sequence[AnyLayerShape], spec: str, context: int) -> CacheSize:
    """Bytes of a cache of ``context`` tokens stored as ``spec``; nothing is allocated.

    Raises:
        ValueError: an unknown spec, or one that does not fit the layers.
    """
    configs: dict[str, Any] = cache_configs(spec)
    cache = ModelKVCache(layout, 1, context, device="meta", **configs)
    values = sum(sum(_widths(shape).values()) for shape in layout)
    per_token = cache.bytes_per_token
    return CacheSize(per_token, 8 * per_token / values, cache.nbytes / context)


def _widths(shape: AnyLayerShape) -> dict[str, int]:
    """Numbers cached of each stream for one token."""
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
    """A session such as generators run, over a new cache of ``rows`` × ``length`` tokens.

    Its steps run one by one: what is measured does not depend on whether a graph could be recorded.

    Args:
        configs: of the streams, as `cache_configs` gives them; options: others of `ModelKVCache`.
    """
    cache = ModelKVCache(
        model.cache_layout, rows, length, device=model.device, **configs, **options
    )
    session = Session(model, lambda _: cache, DecodeGraphs(model, False), 0, length, None)
    session.go_back(cache, [TokenSequence() for _ in range(rows)])
    return session


def forced(session: Session, ids: Tensor, chunk: int) -> Iterator[Tensor]:
    """Feeds ids (B, T), ``chunk`` tokens of each row at once, whatever is predicted; logits (B, t, V) of each."""
    for part in ids.split(chunk, dim=1):
        yield session.verify(part.tolist(), [True] * len(ids))


def cached_forward(model: LanguageModel, chunk: int = CHUNK) -> CachedForward:
    """Runs text through a `ModelKVCache` of ``model`` with ``prefill="stored"``.

    Args:
        model: the model.
        chunk: tokens of each row computed at once at most; fewer where the vocabulary is large.
    """
    return CachedForward(model, chunk)


def with_room(configs: dict[str, KVCacheTensorConfig], chunk: int) -> dict[str, Any]:
    """The same storage with a ring that takes ``chunk`` tokens at once; what is read stays the same."""
    return {
        name: config.model_copy(update={"tail_slack": max(config.tail_slack, chunk)})
        for name, config in configs.items()
    }


@dataclass(frozen=True)
class Scores:
    """What one cache predicted, (B, N) for N predictions in each of B rows.

    Attributes:
        nll: negative log likelihood of the token that follows, nats, float32.
        kl: KL(baseline ‖ candidate) of the next-token distributions, nats, float32.
        accept: Σ min(p_baseline, p_candidate), float32: the chance that speculative sampling keeps a
            token drawn from the candidate (arXiv:2211.17192, theorem 3.5).
        same: whether baseline and candidate rank the same token first, bool.
        correct: whether the candidate ranks the token that follows first, bool.
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
        """Scores of several batches, rows behind rows."""
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
        ids: (B, T) int64 token ids, T of 2 or more.
        specs: caches to measure.
        baseline: what they are compared with.
        positions: (B, N) int; the predictions to score, each named by the token it is made at (0 to
            T - 2), in any order. All T - 1 by default.

    Returns:
        baseline first, then the specs in order, each once.

    Raises:
        ValueError: shapes or positions that do not fit, or an unknown spec.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; (B, T) with T >= 2 is needed")
    chosen = _positions(ids, positions)
    names = list(dict.fromkeys((baseline, *specs)))
    runs = [forward(ids[:, :-1], name) for name in names]
    targets = ids.cpu().gather(1, chosen + 1).flatten()
    columns, rows = chosen.flatten(), torch.arange(len(ids)).repeat_interleave(chosen.shape[1])
    found = {name: torch.zeros(len(Scores.names()), len(columns)) for name in names}
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
        return torch.arange(last + 1).expand(len(ids), -1)
    chosen = torch.as_tensor(positions).to("cpu", torch.int64)
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

    Args:
        logits: (B, t, V).
        at: row and column of each chosen position, (n,) each.
        targets: the tokens that follow, (n,).
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
        """(5, n): the baseline against itself."""
        ones = torch.ones_like(self.nll)
        correct = (self.top == self.targets).to(ones.dtype)
        return torch.stack((self.nll, torch.zeros_like(ones), ones, ones, correct))

    def scores(self, logits: Tensor | None) -> Tensor:
        """(5, n): a candidate, by its logits (B, t, V) of the same chunk."""
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
        """With d = log(q / p), KL is Σ p (exp(d) - 1 - d), as Σ p = Σ q = 1: no term is negative, and

        an error in a logarithm's constant enters squared, so that tiny KLs are exact too.
        """
        x = logits[self.rows[span], self.columns[span]].to(torch.float32)
        targets, p = self.targets[span], self.p[span]
        total = x.logsumexp(-1, keepdim=True)
        nll = (total - x.gather(-1, targets[:, None]))[:, 0]
        top = x.argmax(-1)
        ratio = x.sub_(total).sub_(self.log_p[span]).clamp_(_LEAST_LOG_RATIO, _MOST_LOG_RATIO)
        change = torch.expm1(ratio)
        kl = torch.linalg.vecdot(p, torch.sub(change, ratio, out=ratio))
        accept = 1 + torch.linalg.vecdot(p, change.clamp_(max=0))
        same, correct = (top == self.top[span]).float(), (top == targets).float()
        return torch.stack((nll, kl, accept, same, correct))
