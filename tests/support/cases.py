"""Random layers with any set of options, written by append_, and their float64 reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support import dense, stored
from support.tolerances import RELATIVE_L2, relative_l2
from torch import Tensor

from caramba_fast.formats import CHANNEL_KINDS
from caramba_fast.ops import KVView
from caramba_fast.ops.view import Lanes

HEADS, KV_HEADS = 4, 2
PAGE = 32
#: Options of a case; from s_aux on, options of the attention rather than the storage.
OPTIONS = (
    "pages", "leftpad", "query_lens", "tail", "sinks", "rotate_k", "rotate_v", "null", "s_aux", "window",
    "window_with_sinks", "softcap", "softmax_scale",
)  # fmt: skip


def rows(*values: int) -> Tensor:
    """(B,) int32, as the ops take lengths."""
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Stream:
    """One stored stream and the exact values it was written from."""

    name: str
    view: KVView
    given: Tensor

    @property
    def dim(self) -> int:
        return self.given.shape[-1]


@dataclass
class Case:
    """A written layer, queries for it, and options of the attention."""

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

    @property
    def kv_heads(self) -> int:
        return self.streams["v"].given.shape[1]

    @property
    def seqlens(self) -> Tensor:
        return rows(*self.lengths)

    @property
    def place(self) -> dict[str, Tensor]:
        """Options that locate rows, for both append_ and attention."""
        found = {} if self.table is None else {"block_table": self.table}
        return {**found, "cache_leftpad": rows(*self.leftpad)} if any(self.leftpad) else found

    def append(self, op: Callable[..., None]) -> Case:
        """Writes all rows in one call; shorter ones are padded."""
        views = [stream.view for stream in self.streams.values()]
        longest = max(self.lengths)
        given = [stream.given[:, :, :longest] for stream in self.streams.values()]
        op(*views, *given, torch.zeros_like(self.seqlens), query_lens=self.seqlens, **self.place)
        return self

    def attend(self, op: Callable[..., Any], **more: Any) -> tuple[Tensor, Tensor]:
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
        """Options of the attention besides queries, views and lengths."""
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
        ours = [f"{name}_{part}" for name in self.streams for part in ("tail", "sink")]
        ours += [f"rotate_{name}" for name in self.streams]
        kept = {key: value for key, value in keywords.items() if key in ours}
        start, kinds = torch.zeros_like(self.seqlens), args[-len(self.streams) :]
        return [*stored, *new, start, *kinds], {**kept, **self.place, "query_lens": self.seqlens}

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
            place: dense.turned(dense.by_head(x, self.kv_heads, stream.dim), view.rotate)
            for place, x in found.items()
        }

    def expected(self, **more: Any) -> tuple[Tensor, Tensor]:
        """out and lse of dense attention; two key streams are concatenated."""
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
            group=max(stream.view.group for stream in self.streams.values()),
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
    grouped = any(kind in CHANNEL_KINDS for kind in kinds)
    if grouped:  # tokens of an incomplete group are only in the ring
        ring += residual + block
    streams = {}
    for (name, dim), kind in zip(dims.items(), kinds, strict=True):
        plain = stored.poisoned(places[0], places[1], lanes, dim, kind, block)
        width = lanes.heads_per_lane * dim
        side = {
            part: torch.full((batch, lanes.count, n, width), torch.nan, dtype=torch.float16)
            for part, n in (("tail", ring * (grouped or residual > 0)), ("sink", sink))
            if n
        }
        rotate = f"rotate_{'v' if name == 'v' else 'k'}" in options
        view = KVView(
            plain.codes, plain.scales, kind, **side, rotate=rotate, fit=stored.fit_of(kind)
        )
        given = stored.spread(torch.randn(batch, kv_heads, max(lengths), dim), kind)
        streams[name] = Stream(name, view, given)
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
    """Asserts equality within the tolerance of the query's dtype; empty places exactly 0 and -inf."""
    out, lse = found
    assert out.isfinite().all() and lse.dtype == torch.float32
    assert relative_l2(out, expected[0]) <= RELATIVE_L2[out.dtype]
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)
    assert (out[expected[1] == -torch.inf] == 0).all()
