"""Dense attention in float64, independent of the package.

Shares no code with the reference op: positions, windows, padding and the sources of keys are loops over tokens; a
stored tensor is decoded and rotated back from the description of the formats. Only the 16 levels of NF4 are the
package's, whose tests compare them with QLoRA's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba_fast.formats import NF4_LEVELS


@dataclass
class Sides:
    """Keys and values that are read from elsewhere than the codes, by position.

    Attributes:
        residual_len: a query at p reads key j from the tail if and only if p - j < residual_len.
        group: tokens that are encoded together; then j is the last token of the key's group.
        sink_len: key j is read from the sinks if and only if j - leftpad < sink_len; sinks have precedence.
        tail, sink: (k, v) in the model's basis, (B, H_kv, S, D) each; read nowhere else.
    """

    residual_len: int = 0
    sink_len: int = 0
    tail: tuple[Tensor, Tensor] | None = None
    sink: tuple[Tensor, Tensor] | None = None
    group: int = 1

    def source(self, position: int, key: int, leftpad: int) -> str:
        """Where a query at ``position`` reads ``key`` from."""
        if key - leftpad < self.sink_len:
            return "sink"
        last = (key // self.group + 1) * self.group - 1
        return "tail" if position - last < self.residual_len else "codes"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seqlens: list[int],
    *,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    leftpad: list[int] | None = None,
    softcap: float = 0.0,
    query_lens: list[int] | None = None,
    num_sink_tokens: int = 0,
    null: tuple[Tensor, Tensor] | None = None,
    s_aux: Tensor | None = None,
    sides: Sides | None = None,
) -> tuple[Tensor, Tensor]:
    """q (B, H_q, T, D), k and v (B, H_kv, S, D) -> out (B, H_q, T, D_v), lse (B, H_q, T).

    ``null`` is a key and a value (H_kv, D) every real query sees, ``s_aux`` a logit (H_q,) without value.
    """
    batch, heads, queries, dim = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    factor = dim**-0.5 if scale is None else scale
    sides = sides or Sides()
    places = {"codes": (k, v), "tail": sides.tail, "sink": sides.sink}
    for b in range(batch):
        pad = (leftpad or [0] * batch)[b]
        real = queries if query_lens is None else query_lens[b]
        row = {name: (x[0][b].double(), x[1][b].double()) for name, x in places.items() if x}
        for t in range(real):
            position = seqlens[b] - real + t
            seen = [
                j
                for j in range(min(k.shape[2], position + 1))
                if visible(position, j, window, pad, num_sink_tokens)
            ]
            of: dict[str, list[int]] = {name: [] for name in row}
            for j in seen:
                of[sides.source(position, j, pad)].append(j)
            # (H_kv, tokens, D) and (H_kv, tokens, D_v); softmax does not ask for their order.
            keys, values = (
                torch.cat([row[name][i][:, at] for name, at in of.items()], dim=1) for i in (0, 1)
            )
            if null is not None:
                keys = torch.cat((keys, null[0].double()[:, None]), dim=1)
                values = torch.cat((values, null[1].double()[:, None]), dim=1)
            asked = q[b, :, t].double().unflatten(0, (-1, group))  # (H_kv, group, D)
            logits = (asked @ keys.transpose(1, 2) * factor).flatten(0, 1)
            logits = softcap * torch.tanh(logits / softcap) if softcap else logits
            every = logits if s_aux is None else torch.cat((logits, s_aux[:, None].double()), dim=1)
            if not every.shape[1]:
                continue
            lse[b, :, t] = torch.logsumexp(every, 1)
            weights = (logits - lse[b, :, t, None]).exp().unflatten(0, (-1, group))
            out[b, :, t] = (weights @ values).flatten(0, 1)
    return out, lse


def visible(
    position: int, key: int, window: tuple[int, int], leftpad: int, num_sink_tokens: int = 0
) -> bool:
    if key > position or key < leftpad:
        return False
    return window[0] < 0 or position - key <= window[0] or key - leftpad < num_sink_tokens


def decoded(codes: Tensor, scales: Tensor | None, kind: str) -> Tensor:
    """Codes (…, width) and block scales -> values (…, lane_dim) in float64."""
    if scales is None:
        return codes.double()
    if kind.endswith("_channel"):
        return _decoded_by_channel(codes, scales, kind)
    blocks = scales.shape[-1]
    codes = codes.reshape(*codes.shape[:-1], blocks, codes.shape[-1] // blocks).long()
    if kind != "q8_0":
        codes = torch.cat((codes % 16, codes // 16), dim=-1)
    if kind == "nf4":
        numbers = torch.tensor(NF4_LEVELS, dtype=torch.float64)[codes]
    else:
        numbers = codes.double() - (8 if kind == "q4_0" else 0)
    return (numbers * scales.double()[..., None]).flatten(-2)


def _decoded_by_channel(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Codes (…, S, width) and a row of scales and zeros for each group of tokens -> (…, S, lane_dim) in float64."""
    size, width = codes.shape[-2] // scales.shape[-2], scales.shape[-1] // 2
    rows = scales.double().repeat_interleave(size, dim=-2)
    if kind == "q4_channel":
        stored = scales[..., :width].repeat_interleave(size, dim=-2)
        codes = torch.cat(
            [
                half
                for bytes_, marks in zip(
                    codes.long().split(16, dim=-1), stored.split(32, dim=-1), strict=True
                )
                for half in _divided(bytes_, *marks.split(16, dim=-1))
            ],
            dim=-1,
        )
    return rows[..., width:] + rows[..., :width].abs() * codes.double()


def _divided(bytes_: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of two channels that share bytes, in units of their scales, which say how many bits each lends."""
    unit = 2 ** (4 - _lent(low) + _lent(high))
    return bytes_ % unit, bytes_ // unit * unit / 16


def _lent(scale: Tensor) -> Tensor:
    """Bits a channel lends: one for a negative scale, two if its last bit is set too."""
    odd = scale.view(torch.int16).long() % 2
    return torch.where(torch.signbit(scale), 1 + odd, 0)


def by_head(lanes: Tensor, heads: int, dim: int) -> Tensor:
    """(B, lanes, S, g * D) -> (B, heads, S, D): head h is the (h % g)-th part of lane h // g."""
    g = lanes.shape[-1] // dim
    return torch.stack(
        [lanes[:, h // g, :, h % g * dim : (h % g + 1) * dim] for h in range(heads)], dim=1
    )


def by_row(pages: Tensor, table: Tensor) -> Tensor:
    """(pages, lanes, size, width) and a block table -> (B, lanes, S, width); no page reads as NaN."""
    size = pages.shape[2]
    rows = torch.full(
        (table.shape[0], pages.shape[1], table.shape[1] * size, pages.shape[3]),
        torch.nan,
        dtype=torch.float64,
    )
    for b, row in enumerate(table.tolist()):
        for i, page in enumerate(row):
            if 0 <= page < pages.shape[0]:
                rows[b, :, i * size : (i + 1) * size] = pages[page].double()
    return rows


def by_position(ring: Tensor, seqlens: Sequence[int], slots: int) -> Tensor:
    """A ring (B, lanes, R, width) -> (B, lanes, slots, width) by token; NaN where it holds nothing."""
    rows = torch.full((*ring.shape[:2], slots, ring.shape[3]), torch.nan, dtype=torch.float64)
    size = ring.shape[2]
    for b, length in enumerate(seqlens):
        for j in range(max(0, length - size), length):
            rows[b, :, j] = ring[b, :, j % size].double()
    return rows


def from_leftpad(sink: Tensor, leftpad: Sequence[int], slots: int) -> Tensor:
    """Sinks (B, lanes, n, width) -> (B, lanes, slots, width) by token; NaN elsewhere."""
    rows = torch.full((*sink.shape[:2], slots, sink.shape[3]), torch.nan, dtype=torch.float64)
    for b, pad in enumerate(leftpad):
        for i in range(min(sink.shape[2], slots - pad)):
            rows[b, :, pad + i] = sink[b, :, i].double()
    return rows


def hadamard_matrix(width: int) -> Tensor:
    """(width, width) orthonormal float64, one block for each power of two, largest first."""
    blocks, left = [], width
    while left:
        size = 2 ** int(math.log2(left))
        blocks.append(sylvester(size))
        left -= size
    return torch.block_diag(*blocks)


def sylvester(size: int) -> Tensor:
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def turned(x: Tensor, rotate: bool) -> Tensor:
    """x (…, D) in float64, rotated or rotated back: the rotation is its own inverse."""
    return x.double() @ hadamard_matrix(x.shape[-1]) if rotate else x.double()
