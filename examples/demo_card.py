"""Measures a trained demo model and installs it in the package with its model card.

    python examples/demo_card.py runs/demo-gqa --name gqa

Bits per byte on the held-out files, beside xz and an interpolated token trigram trained on the same
text; recall of key-value lines by distance; the training curve. Nothing in the card is typed by hand.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from demo_data import encode, read, source_files

from caramba_fast.models import Transformer, load_model, load_tokenizer
from caramba_fast.quality import RecallFormat, draw_needles, retrieval_rate

FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_curve.csv",
)
CONTEXT, DISTANCES, TRIALS = 2048, (64, 256, 512, 1024, 1536), 200
HELD_OUT_BYTES = 131_072


def model_bits(model: Transformer, tokens: np.ndarray) -> float:
    """Bits of the whole token stream, in windows of CONTEXT that overlap by half."""
    total, half = 0.0, CONTEXT // 2
    for start in range(0, len(tokens) - 1, half):
        window = torch.from_numpy(tokens[max(start - half, 0) : start + half + 1].astype(np.int64))
        new = min(half, len(tokens) - 1 - start)
        with torch.no_grad():
            logits = model(window[None, :-1])[0, -new:]
        logp = logits.log_softmax(-1).gather(-1, window[-new:, None])
        total -= float(logp.sum()) / math.log(2)
    return total


class Counts:
    """How often each n-gram occurs, found by binary search over its packed key."""

    def __init__(self, keys: np.ndarray) -> None:
        self.keys, self.counts = np.unique(keys, return_counts=True)

    def of(self, keys: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)


def trigram_bits(train: np.ndarray, tokens: np.ndarray, vocab: int) -> float:
    """Bits under a trigram with Witten-Bell interpolation (IEEE Trans. Inf. Theory 37(4), 1991)."""

    def packed(stream: np.ndarray, order: int) -> np.ndarray:
        key = np.zeros(len(stream) - order + 1, dtype=np.int64)
        for offset in range(order):
            key = key * vocab + stream[offset : offset + len(key)]
        return key

    train, tokens = train.astype(np.int64), tokens.astype(np.int64)
    probability = np.full(len(tokens), 1.0 / vocab)
    for order in (1, 2, 3):
        grams = Counts(packed(train, order))
        contexts = Counts(packed(train[:-1], order - 1)) if order > 1 else None
        distinct = Counts(grams.keys // vocab)  # each n-gram once: continuations of its context
        seen = grams.of(packed(tokens, order)).astype(np.float64)
        if contexts is None:
            total, kinds = float(len(train)), float(len(grams.keys))
        else:
            context = packed(tokens[:-1], order - 1)
            total, kinds = contexts.of(context), distinct.of(context)
        lower = probability[order - 1 :]
        denominator = np.maximum(total + kinds, 1e-9)
        mixed = (seen + kinds * lower) / denominator
        probability[order - 1 :] = np.where(total + kinds > 0, mixed, lower)
    return float(-np.log2(probability[1:]).sum())


def curve_table(path: Path, rows: int = 12) -> str:
    """A thinned training curve as Markdown."""
    with path.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    picked = [lines[i] for i in np.linspace(0, len(lines) - 1, min(rows, len(lines))).astype(int)]
    head = ("step", "tokens", "minutes", "context", "held_out", "recall")
    body = "\n".join("| " + " | ".join(line[name] for name in head) + " |" for line in picked)
    return (
        "| step | tokens | minutes | context | held-out nats/token | recall at half context |\n|"
        + ("---:|" * len(head))
        + "\n"
        + body
    )


def install(source: Path, folder: Path) -> None:
    """Copies the checkpoint and a sample of the held-out source into the package."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(source / name, folder / name)
    sample = "".join(read(source_files()[1]))
    cut = sample.encode("utf-8")[:HELD_OUT_BYTES].decode("utf-8", errors="ignore")
    (folder.parent / "held_out.txt").write_text(cut[: cut.rindex("\n") + 1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--name", default="gqa")
    parser.add_argument("--command", help="what trained it, where one plain run did not")
    parser.add_argument("--remark", default="", help="what a reader must know of this very run")
    args = parser.parse_args()
    package = Path(__file__).resolve().parent.parent / "caramba_fast" / "models" / "demo"
    install(args.source, package / args.name)
    model, tokenizer = load_model(package / args.name), load_tokenizer(package / args.name)
    train_files, held_out_files = source_files()
    train = encode(tokenizer, read(train_files))
    held_out = encode(tokenizer, read(held_out_files))
    raw = "".join(read(held_out_files)).encode("utf-8")
    bits = {
        "this model": model_bits(model, held_out),
        "token trigram (Witten-Bell), same training text": trigram_bits(
            train, held_out, model.vocab_size
        ),
        "xz -9e on the held-out text itself": 8.0
        * len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)),
    }
    form = RecallFormat.of(tokenizer)
    recall = {
        distance: retrieval_rate(model, draw_needles(form, held_out, distance, TRIALS), "fp32")
        for distance in DISTANCES
    }
    size = sum(parameter.numel() for parameter in model.parameters())
    with (args.source / "training_curve.csv").open(encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    command = args.command or (
        f"python examples/train_demo.py --architecture {args.name} --out runs/demo-{args.name} "
        f"--minutes {float(last['minutes']):.0f}"
    )
    dims = model.config.decoupled
    if dims is None:
        kind = "a Hugging Face `LlamaForCausalLM` folder"
        heads = f"{model.config.num_key_value_heads} kv heads of {model.config.head_dim}"
    else:
        kind = "a folder `caramba_fast.models.load_model` reads (transformers has no such model)"
        heads = (
            f"{model.config.num_key_value_heads} kv heads of decoupled attention: semantic keys of width "
            f"{dims.sem_dim}, geometric keys of {dims.geo_dim}, values of {dims.v_dim}"
        )
    lines = [
        f"# Demo model `{args.name}`",
        "",
        f"A {size / 1e6:.2f}M-parameter decoder ({model.config.num_hidden_layers} layers, width "
        f"{model.config.hidden_size}, {model.config.num_attention_heads} query heads over "
        f"{heads}, context "
        f"{model.config.max_position_embeddings}, byte-level BPE of {model.vocab_size} tokens), stored in "
        f"float16 as {kind}. It exists so that speed and quality of quantized "
        "caches can be measured offline, on a model that has learned something.",
        "",
        "## Data",
        "",
        f"The source of the Python standard library ({len(train_files)} files, {len(train):,} tokens; PSF "
        f"licence), one file in fifty held out ({len(held_out_files)} files, {len(raw):,} bytes; the first "
        f"{HELD_OUT_BYTES // 1024} KiB ship as `held_out.txt`). Between lines of code stand recall lines, "
        "`#: key = value`, asked for again further on; their distance grows with the context.",
        "",
        "## Training",
        "",
        f"`{command}`: {int(last['step']):,} steps, {int(last['tokens']):,} tokens, "
        "on a machine of two CPU cores that had other work besides. Muon for the blocks' matrices, AdamW for the "
        "rest, bfloat16 autocast, context 512, then 1024, then 2048."
        + (f" {args.remark}" if args.remark else ""),
        "",
        curve_table(args.source / "training_curve.csv"),
        "",
        "## Bits per byte on the held-out files",
        "",
        "| | bits/byte |",
        "|---|---:|",
        *[f"| {name} | {value / len(raw):.3f} |" for name, value in bits.items()],
        "",
        f"## Recall (exact, greedy, {TRIALS} needles each, chance {1 / len(form.words):.1%})",
        "",
        "| distance in tokens | found |",
        "|---:|---:|",
        *[f"| {distance} | {rate:.1%} |" for distance, rate in recall.items()],
        "",
    ]
    (package / args.name / "MODEL_CARD.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
