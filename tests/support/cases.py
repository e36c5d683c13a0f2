"""Random layers with any set of options, written by append_, and what they mean in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support import dense, stored
from support.tolerances import RELATIVE_L2, relative_l2
from torch import Tensor

from caramba_fast.ops import KVView, Transform, phase_table
from caramba_fast.ops.view import Lanes

HEADS, KV_HEADS = 4, 2
PAGE = 32
#: What a case can have; s_aux and the rest are options of the attention, not of the storage.
OPTIONS = (
    "pages", "leftpad", "query_lens", "tail", "sinks", "mean", "bias", "k_scale", "v_scale", "rotate_k",
    "rotate_v", "null", "s_aux", "window", "window_with_sinks", "softcap", "softmax_scale",
)  # fmt: skip


def rows(*values: int) -> Tensor:
    """(B,) int32, as the ops take lengths."""
    return torch.tensor(values, dtype=torch.int32)


def half_split(heads: int, dim: int, count: int, rotary: int | None = None) -> Tensor:
    """``count`` random pairs (i, i + rotary / 2) of each head."""
    half = (rotary or dim) // 2
    first = torch.stack([torch.randperm(half)[:count] for _ in range(heads)])
    return torch.stack((first, first + half), dim=-1).to(torch.int32)


def interleaved(heads: int, dim: int, count: int, rotary: int | None = None) -> Tensor:
    """``count`` random pairs (2 i, 2 i + 1) of each head."""
    first = torch.stack([torch.randperm((rotary or dim) // 2)[:count] for _ in range(heads)]) * 2
    return torch.stack((first, first + 1), dim=-1).to(torch.int32)


def random_basis(
    options: Collection[str],
    stream: str,
    heads: int,
    dim: int,
    *,
    pairs: Callable[..., Tensor] = half_split,
    rotary: int | None = None,
    size: float = 3.0,
) -> dense.Basis:
    """Constants as large as ``size``, of the kinds named in ``options``."""
    key, name = stream != "v", "k" if stream != "v" else "v"
    basis = dense.Basis(rotate=f"rotate_{name}" in options)
    if key and "mean" in options:
        basis.mean = torch.randn(heads, dim) * size
    if key and "bias" in options:
        count = min(3, (rotary or dim) // 2)
        basis.bias = torch.randn(heads, count, 2) * size
        basis.pairs = pairs(heads, dim, count, rotary)
        basis.theta = torch.rand(heads, count, dtype=torch.float64) ** 4
    if f"{name}_scale" in options:
        basis.scale = torch.rand(heads, dim) * 4 + 0.25
    return basis


def transform(basis: dense.Basis, slots: int) -> Transform:
    """The same constants in the package's words."""
    phases = None if basis.theta is None else phase_table(basis.theta, slots)
    return Transform(basis.mean, basis.bias, basis.pairs, phases, basis.scale, basis.rotate)


@dataclass
class Stream:
    """One stored stream and what was meant to be stored."""

    name: str
    view: KVView
    basis: dense.Basis
    given: Tensor

    @property
    def dim(self) -> int:
        return self.given.shape[-1]


@dataclass
class Case:
    """A layer that has been written, queries for it, and options of the attention."""

    streams: dict[str, Stream]
    queries: dict[str, Tensor]
    lengths: list[int]
    leftpad: list[int]
    query_lens: list[int] | None
    table: Tensor | None
    residual_len: int
    ring: int
    sink_len: int
    options: dict[str, Any] = field(default_factory=dict)
    null: dict[str, Tensor] = field(default_factory=dict)

    # -- in the package's words -----------------------------------------------------------

    @property
    def kv_heads(self) -> int:
        return self.streams["v"].given.shape[1]

    @property
    def seqlens(self) -> Tensor:
        return rows(*self.lengths)

    @property
    def place(self) -> dict[str, Tensor]:
        """Where rows are, for append_ and attention alike."""
        found = {} if self.table is None else {"block_table": self.table}
        return {**found, "cache_leftpad": rows(*self.leftpad)} if any(self.leftpad) else found

    def append(self, op: Callable[..., None]) -> Case:
        """Writes every row whole, in one call that is longer than the shorter ones."""
        views = [stream.view for stream in self.streams.values()]
        longest = max(self.lengths)
        given = [stream.given[:, :, :longest] for stream in self.streams.values()]
        op(*views, *given, torch.zeros_like(self.seqlens), query_lens=self.seqlens, **self.place)
        return self

    def attend(self, op: Callable[..., Any], **more: Any) -> tuple[Tensor, Tensor]:
        """out and lse of the package."""
        views = {name: stream.view for name, stream in self.streams.items()}
        return op(
            *self.queries.values(),
            *{**views, **more.pop("views", {})}.values(),
            more.pop("cache_seqlens", self.seqlens),
            return_softmax_lse=True,
            **{**self.keywords, **more},
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """What the attention is told besides queries, views and lengths."""
        found = {**self.place, **self.options, "n_kv_heads": self.kv_heads}
        found |= {f"null_{name}": x for name, x in self.null.items()}
        if self.query_lens is not None:
            found["query_lens"] = rows(*self.query_lens)
        return {**found, "residual_len": self.residual_len} if self.residual_len else found

    def flat(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments of the torch op behind the public function."""
        views = {name: stream.view for name, stream in self.streams.items()}
        stored = [part for view in views.values() for part in (view.codes, view.scales)]
        keywords = dict(self.keywords)
        for name, view in views.items():
            keywords |= view.options(name)
        kinds = [view.kind for view in views.values()]
        return [*self.queries.values(), *stored, self.seqlens, *kinds], keywords

    def flat_append(self) -> tuple[list[Any], dict[str, Any]]:
        """The same for append_: the longest row's tokens from slot 0."""
        args, keywords = self.flat()
        stored = args[len(self.queries) : -len(self.streams) - 1]
        new = [stream.given for stream in self.streams.values()]
        names = ("tail", "sink", "mean", "bias", "pairs", "phases", "scale")
        ours = [f"{name}_{part}" for name in self.streams for part in names]
        ours += [f"rotate_{name}" for name in self.streams]
        kept = {key: value for key, value in keywords.items() if key in ours}
        start, kinds = torch.zeros_like(self.seqlens), args[-len(self.streams) :]
        return [*stored, *new, start, *kinds], {**kept, **self.place, "query_lens": self.seqlens}

    # -- in float64 -----------------------------------------------------------------------

    def meaning(self, stream: Stream) -> dict[str, Tensor]:
        """The model's keys or values as read from the codes, the tail and the sinks."""
        view = stream.view
        lanes = dense.decoded(view.codes, view.scales, view.kind)
        lanes = lanes if self.table is None else dense.by_row(lanes, self.table)
        slots = lanes.shape[2]
        found = {"codes": lanes}
        if view.tail is not None:
            found["tail"] = dense.by_position(view.tail, self.lengths, slots)
        if view.sink is not None:
            found["sink"] = dense.from_leftpad(view.sink, self.leftpad, slots)
        return {
            place: dense.to_model(
                dense.by_head(x, self.kv_heads, stream.dim), stream.basis, self.leftpad
            )
            for place, x in found.items()
        }

    def expected(self, **more: Any) -> tuple[Tensor, Tensor]:
        """out and lse of dense attention; two key streams as one, side by side."""
        options = {**self.options, **more}
        keys = [stream for name, stream in self.streams.items() if name != "v"]
        default = {s.name: s.dim**-0.5 for s in keys}
        names = {"k": "softmax_scale", "k_sem": "sem_scale", "k_geo": "geo_scale"}
        factor = {n: options.pop(names[n], default[n]) for n in default}
        q = torch.cat([q.double() * factor[n] for n, q in self.queries.items()], dim=-1)
        parts = [self.meaning(stream) for stream in keys]
        k = {place: torch.cat([part[place] for part in parts], dim=-1) for place in parts[0]}
        v = self.meaning(self.streams["v"])
        sides = dense.Sides(
            self.residual_len, self.sink_len,
            *((k[place], v[place]) if place in v else None for place in ("tail", "sink")),
            group=max(stream.view.group for stream in keys),
        )  # fmt: skip
        null = None
        if self.null:
            null = torch.cat([self.null[s.name] for s in keys], dim=-1), self.null["v"]
        return dense.attend(
            q, k["codes"], v["codes"], self.lengths, scale=1.0, leftpad=self.leftpad,
            query_lens=self.query_lens, null=null, sides=sides,
            window=tuple(options.pop("window_size", (-1, -1))), **options,
        )  # fmt: skip


def build(
    options: Collection[str] = (),
    *,
    dims: dict[str, int] | None = None,
    kinds: Sequence[str] = ("q8_0", "q4_0"),
    tokens: int = 1,
    lengths: Sequence[int] = (45, 18),
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    slots: int = 64,
    residual_len: int = 6,
    ring: int = 13,
    sink_len: int = 3,
    block: int = 32,
    **basis: Any,
) -> Case:
    """A poisoned layer with the named options; `Case.append` writes it."""
    dims = dims or {"k": 32, "v": 32}
    batch, lanes = len(lengths), Lanes.of(kv_heads, *dims.values())
    table, places = None, (batch, slots)
    if "pages" in options:
        table, places = shuffled_pages(lengths, slots // PAGE)
    leftpad = [2 + 2 * b for b in range(batch)] if "leftpad" in options else [0] * batch
    counts = [max(tokens - b, 0) for b in range(batch)] if "query_lens" in options else None
    residual, sink = residual_len * ("tail" in options), sink_len * ("sinks" in options)
    streams = {}
    for (name, dim), kind in zip(dims.items(), kinds, strict=True):
        plain = stored.poisoned(places[0], places[1], lanes, dim, kind, block)
        constants = random_basis(options, name, kv_heads, dim, **basis)
        width = lanes.heads_per_lane * dim
        side = {
            part: torch.full((batch, lanes.count, n, width), torch.nan, dtype=torch.float16)
            for part, n in (("tail", ring * bool(residual)), ("sink", sink))
            if n
        }
        view = KVView(
            plain.codes, plain.scales, kind, **side, transform=transform(constants, slots)
        )
        given = torch.randn(batch, kv_heads, max(lengths), dim)
        streams[name] = Stream(name, view, constants, given)
    queries = {n: torch.randn(batch, heads, tokens, d) for n, d in dims.items() if n != "v"}
    null = {n: torch.randn(kv_heads, d) for n, d in dims.items()} if "null" in options else {}
    return Case(
        streams, queries, list(lengths), leftpad, counts, table, residual, ring, sink,
        attention_options(options, heads, queries), null,
    )  # fmt: skip


def attention_options(
    options: Collection[str], heads: int, queries: Collection[str]
) -> dict[str, Any]:
    """Values for those of the named options that belong to the attention alone."""
    found: dict[str, Any] = {}
    if "s_aux" in options:
        found["s_aux"] = torch.randn(heads)
    if "window" in options:
        found["window_size"] = (9, 0)
    if "window_with_sinks" in options:
        found |= {"window_size": (4, 0), "num_sink_tokens": 5}
    if "softcap" in options:
        found["softcap"] = 2.0
    if "softmax_scale" in options:
        names = {"k": "softmax_scale", "k_sem": "sem_scale", "k_geo": "geo_scale"}
        found |= {names[name]: 0.3 - 0.1 * i for i, name in enumerate(queries)}
    return found


def shuffled_pages(lengths: Sequence[int], per_row: int) -> tuple[Tensor, tuple[int, int]]:
    """A block table over a shuffled pool with pages to spare; -1 past a row's length."""
    pages = len(lengths) * per_row + 2
    order = torch.randperm(pages).tolist()
    table = torch.full((len(lengths), per_row), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for i in range(-(-length // PAGE)):
            table[b, i] = order.pop()
    return table, (pages, PAGE)


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Within the tolerance of the query's dtype; empty places exactly 0 and -inf."""
    out, lse = found
    assert out.isfinite().all() and lse.dtype == torch.float32
    assert relative_l2(out, expected[0]) <= RELATIVE_L2[out.dtype]
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert (out[expected[1] == -torch.inf] == 0).all()
