"""The tables of docs/scaling.md: bytes read and moved for each token, on 1 to 64 devices.

``python -m caramba_fast.bench.serving.scaling`` prints them, ``--publish`` rewrites the page. Nothing is measured: the
figures are those of `caramba_fast.bench.serving.traffic`, which the tests compare with real ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from caramba_fast.bench.pages.sections import replaced, table
from caramba_fast.bench.serving.traffic import StepShape, decode_step, reduced_instead
from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.models import ModelConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
DEVICES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (131_072, 1_048_576)
KINDS = ("fp16", "q8", "q4")
ITEMSIZE = 2
#: The sizes of Llama 3.1 8B, in bf16.
MODEL = ModelConfig(
    vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131_072,
)  # fmt: skip


def step_shape(config: ModelConfig, kind: str, itemsize: int = ITEMSIZE) -> StepShape:
    """A standard model with a cache of one kind."""
    width, kv_width = (
        heads * config.head_dim
        for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    settings = cache_configs(kind)
    layer = ModelKVCache(
        [LayerShape(kv_width, kv_width, config.num_key_value_heads)],
        1,
        128,
        device="meta",
        **settings,
    )
    attention = config.hidden_size * (2 * width + 2 * kv_width)
    mlp = 3 * config.hidden_size * config.intermediate_size
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    return StepShape(
        layers=config.num_hidden_layers, hidden=config.hidden_size, heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads, v_head_dim=config.head_dim, itemsize=itemsize,
        token_bytes=layer.bytes_per_token, tail_tokens=settings["k_cfg"].residual_len,
        tail_token_bytes=2 * 2 * kv_width,
        split_weights=itemsize * config.num_hidden_layers * (attention + mlp),
        whole_weights=itemsize * (norms + config.vocab_size * config.hidden_size),
    )  # fmt: skip


def layouts(config: ModelConfig, devices: int) -> list[tuple[str, int, int]]:
    """(name, tensor, context) ranks of each way to use so many devices."""
    heads = config.num_key_value_heads
    found = [("tokens", 1, devices)]
    if heads % devices == 0 and devices > 1:
        found.append(("heads", devices, 1))
    if devices > heads:
        found.append(("heads and tokens", heads, devices // heads))
    return found


def size(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:.0f} B" if count else "–"


def step_table(kind: str, tokens: int) -> list[str]:
    """A row for each number of devices and way to use them."""
    shape = step_shape(MODEL, kind)
    body = []
    for devices in DEVICES:
        for name, tensor, context in layouts(MODEL, devices):
            step = decode_step(shape, tokens, tensor=tensor, context=context)
            body.append((
                devices, name if devices > 1 else "", size(step.cache_read), size(step.weights_read),
                step.collectives or "–", size(step.given), size(step.received),
            ))  # fmt: skip
    headings = (
        "devices", "share", "cache read", "weights read", "collectives", "given", "received",
    )  # fmt: skip
    return table(headings, body, left=2)


def kinds_table() -> list[str]:
    """Cache bytes read by one device, and by each of sixteen that share the tokens, by kind."""
    body = []
    for kind in KINDS:
        shape = step_shape(MODEL, kind)
        cells = [
            size(decode_step(shape, tokens, context=devices).cache_read)
            for tokens in CONTEXTS
            for devices in (1, 16)
        ]
        body.append((f"`{kind}`", *cells))
    headings = (
        "kind",
        *(f"{tokens:,} tokens, {n}" for tokens in CONTEXTS for n in ("1 device", "16")),
    )
    return table(headings, body)


def merge_table() -> list[str]:
    """Cost of merging the ranks' parts: by all-gather, as implemented, and by all-reduce."""
    shape, body = step_shape(MODEL, "q4"), []
    for devices in DEVICES[1:]:
        step = decode_step(shape, CONTEXTS[0], context=devices)
        collectives, received = reduced_instead(shape, devices)
        body.append((devices, step.collectives, size(step.received), collectives, size(received)))
    headings = ("devices", "all-gathers", "received", "all-reduces", "received")
    return table(headings, body)


def parts() -> dict[str, Sequence[str]]:
    """Lines of each part of the page."""
    return {
        "kinds": kinds_table(),
        "merge": merge_table(),
        **{f"{kind} {tokens}": step_table(kind, tokens) for kind in ("q4",) for tokens in CONTEXTS},
    }


def published(page: str) -> str:
    """The page with the current tables."""
    for name, lines in parts().items():
        page = replaced(page, name, lines)
    return page


def main() -> None:
    """Prints the tables, or writes them into the page."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--publish", action="store_true", help="rewrite docs/scaling.md")
    if parser.parse_args().publish:
        PAGE.write_text(published(PAGE.read_text("utf-8")), "utf-8")
        return
    for name, lines in parts().items():
        print("\n".join([name, "", *lines, ""]))


if __name__ == "__main__":
    main()
