"""Decode attention of programs that are not Python packages: ``ggml.csv`` beside the results of `run`.

Such a program is built and measured by hand, for 32 query heads and 8 kv heads of 128 and one query token, K and V in
the same format. Its file has the columns of `COLUMNS` and may have ``ours_ms``: this package's time for the same,
sampled in the same rounds. Without it the time in the results of `run` is taken, if it is of the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FILE = "ggml.csv"
COLUMNS = (
    "peer", "commit", "kind", "batch", "kv", "threads", "median_ms", "machine", "date"
)  # fmt: skip
#: The shape that was measured.
SHAPE = {"heads": "32", "kv_heads": "8", "dim": "128", "tokens": "1", "window": "0"}
HEADING = ("peer", "format", "batch", "KV", "threads", "peer, ms", "ours, ms", "times faster")
Row = Mapping[str, Any]


def ours_ms(peer: Row, rows: Sequence[Row]) -> float | None:
    """This package's time for the same, or None where it was not measured."""
    if peer.get("ours_ms"):
        return float(peer["ours_ms"])
    same = {**SHAPE, **{name: peer[name] for name in ("kind", "batch", "kv", "threads")}}
    same |= {"device": peer["machine"], "op": "decode_attention", "implementation": "caramba"}
    for row in rows:
        if row.get("median_us") and all(row[name] == value for name, value in same.items()):
            return float(row["median_us"]) * 1e-3
    return None


def section(peers: Sequence[Row], rows: Sequence[Row]) -> list[str]:
    """The page's table: how many times faster than each peer in its format; ValueError if columns are missing."""
    if not peers:
        return []
    missing = [name for name in COLUMNS if name not in peers[0]]
    if missing:
        raise ValueError(f"{FILE} lacks {', '.join(missing)}")
    origins = dict.fromkeys(
        f"{peer['peer']} at {peer['commit'][:12]}, {peer['machine']}, {peer['date']}"
        for peer in peers
    )
    lines = [
        "## Beside ggml, the same format", "",
        f"From `bench/results/{FILE}`: decode attention of 32 query heads, 8 kv heads of 128, one token, the cache of "
        f"each kv head contiguous. 'ggml' is its flash attention, 'mul_mat' two products with a softmax between them, "
        f"'grouped' the same with the query heads of a kv head in one product. {'; '.join(origins)}.", "",
        f"| {' | '.join(HEADING)} |", "|---|---|" + "---:|" * (len(HEADING) - 2),
    ]  # fmt: skip
    for peer in peers:
        theirs, ours = float(peer["median_ms"]), ours_ms(peer, rows)
        figures = ("", "") if ours is None else (f"{ours:.3f}", f"{theirs / ours:.1f}")
        cells = [*(str(peer[name]) for name in ("peer", "kind", "batch", "kv", "threads"))]
        lines.append(f"| {' | '.join((*cells, f'{theirs:.3f}', *figures))} |")
    return lines
