"""Gives the GQA demo model large key biases and trains it back to its own quality.

    python examples/train_biased.py

Key biases of tens to hundreds on a few RoPE pairs, as Qwen2's, ruin keys in 4 bits. No change that
preserves a RoPE model's function can add them: with R_t the rotation, q · R_t b depends on the distance.
So the biases are drawn and frozen, and only q_proj and k_proj are trained to reproduce the base model's
output: the loss is KL(base ‖ biased), weighted towards recall as in the base's training. The result ships
as a delta to the base model (`caramba_fast.models.demos.with_delta`) with its card and curve.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import RecallMixer, encode, read, source_files
from demo_training import (
    Curve,
    Optimizers,
    held_out_nll,
    rate_factor,
    recall_rate,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from caramba_fast.models import ModelConfig, Transformer, demo_tokenizer, load_demo
from caramba_fast.models.demos import DELTA, with_delta
from caramba_fast.quality import RecallFormat, draw_needles, retrieval_rate

BASE, NAME = "gqa", "gqa_bias"
#: RoPE pairs of high, middle and low frequency; one of each gets a bias, in every layer and kv head.
BANDS = (range(0, 6), range(10, 19), range(26, 32))
SMALLEST, LARGEST = 20.0, 200.0
#: Contribution of the biases to the logits at the start, relative to that of these pairs' keys before.
INITIAL_SHARE = 1.0
#: Context of training, and the one at which quality is measured.
CONTEXT, LENGTH = 2048, 1024
WARMUP_STEPS = 10
TRIALS = 200
PACKAGE = Path(__file__).resolve().parent.parent / "caramba_fast" / "models" / "demo" / NAME


@torch.no_grad()
def pair_rms(model: Transformer, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean square norms (layers, H_kv, D / 2) of the RoPE pairs of queries and keys of ids (B, T)."""
    seen: dict[str, list[Tensor]] = {"q_proj": [], "k_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda _module, _x, out, found=found: found.append(out)
        )
        for layer in model.model.layers
        for name, found in seen.items()
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    heads, pairs = model.config.num_key_value_heads, model.config.head_dim // 2
    queries, keys = (
        torch.stack(found).flatten(1, 2).unflatten(-1, (heads, -1, 2, pairs)).square().sum(4)
        for found in seen.values()
    )
    return queries.mean((1, 3)).sqrt(), keys.mean((1, 3)).sqrt()


def draw_biases(queries: Tensor, keys: Tensor, seed: int) -> Tensor:
    """Key biases (layers, H_kv, 2, D / 2), zero but for one pair of each band.

    The chosen pair is the band's least used, with the smallest product of ``queries`` and ``keys``
    (layers, H_kv, D / 2): a large bias dominates its pair, so a head that depends on that pair, such as a
    previous-token head, would stop working. Norms are log-uniform from SMALLEST to LARGEST, directions in
    the pair's plane random. Values are rounded to float16, the dtype they ship in, before training.
    """
    rng = np.random.default_rng(seed)
    biases = torch.zeros(*keys.shape[:2], 2, keys.shape[2], dtype=torch.float64)
    for layer, head in np.ndindex(*keys.shape[:2]):
        for band in BANDS:
            pair = min(band, key=lambda p: float(queries[layer, head, p] * keys[layer, head, p]))
            norm = math.exp(rng.uniform(math.log(SMALLEST), math.log(LARGEST)))
            angle = rng.uniform(0, 2 * math.pi)
            biases[layer, head, 0, pair] = norm * math.cos(angle)
            biases[layer, head, 1, pair] = norm * math.sin(angle)
    return biases.half().float()


class RowScale(nn.Module):
    """Parametrization: rows of a weight times constants, so that rows with a large bias take small steps."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor)

    def forward(self, free: Tensor) -> Tensor:
        """Trained tensor -> weight or bias, its rows or values scaled."""
        return free * self.factor.view(-1, *[1] * (free.ndim - 1))


def with_biases(base: Transformer, biases: Tensor, keys: Tensor) -> Transformer:
    """A Qwen2-type copy of ``base`` with these key biases, ready to train q_proj and k_proj.

    Query rows of biased pairs are scaled down so that the bias initially contributes INITIAL_SHARE of what the
    pair's keys (of rms ``keys``) contributed to the logits, and are trained through that factor.
    """
    config = ModelConfig.from_hf({**base.config.to_hf(), "model_type": "qwen2"})
    model = Transformer(config)
    model.load_state_dict(base.state_dict(), strict=False)
    model.requires_grad_(False)
    norm = biases.norm(dim=2)
    shrink = torch.where(norm > 0, INITIAL_SHARE * keys / norm.clamp_min(1e-9), 1.0)
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        attention.k_proj.bias.copy_(biases[index].flatten())
        rows = shrink[index, :, None, None].expand(-1, groups, 2, -1).flatten()
        attention.k_proj.weight.requires_grad_(True)
        for name in ("weight", "bias"):
            getattr(attention.q_proj, name).requires_grad_(True)
            parametrize.register_parametrization(attention.q_proj, name, RowScale(rows))
    return model


def weighted_divergence(logits: Tensor, reference: Tensor, weights: Tensor) -> Tensor:
    """Mean KL(reference ‖ logits) over tokens of unequal weight."""
    each = F.kl_div(
        logits.log_softmax(-1), reference.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    return (each * weights).sum() / weights.sum()


def train(
    model: Transformer,
    base: Transformer,
    args: argparse.Namespace,
    tokens: np.ndarray,
    held_out: np.ndarray,
) -> tuple[int, float]:
    """Trains in float32 (in bfloat16 a key of 200 is exact to 1 only); returns steps and minutes."""
    form = RecallFormat.of(demo_tokenizer(BASE))
    mixer = RecallMixer(tokens, form, args.seed)
    optimizers, curve = Optimizers(model, args.rate), Curve(args.out / "training_curve.csv")
    student, teacher = (
        torch.compile(one, dynamic=False) if args.compile else one for one in (model, base)
    )
    step, losses, began = 0, [], time.monotonic()

    def minutes() -> float:
        return (time.monotonic() - began) / 60

    def report() -> None:
        model.eval()
        nll = held_out_nll(model, held_out, LENGTH)
        recall = recall_rate(model, form, held_out, LENGTH)
        curve.add(step, step * args.batch_tokens, minutes(), CONTEXT, losses, nll, recall)
        model.train()
        losses.clear()

    while (progress := minutes() / args.minutes) < 1.0:
        rows, weights = mixer.batch(args.batch_tokens // CONTEXT, CONTEXT, CONTEXT)
        ids = torch.from_numpy(rows[:, :-1])
        with torch.no_grad():
            reference = teacher(ids)
        loss = weighted_divergence(student(ids), reference, torch.from_numpy(weights))
        optimizers.step(loss, rate_factor(step, progress, WARMUP_STEPS, decay_from=0.0))
        losses.append(float(loss.detach()))
        step += 1
        if step % args.report == 0:
            report()
    if losses:
        report()
    return step, minutes()


def save_delta(model: Transformer, out: Path) -> None:
    """Saves the changed weights and biases, in float16, with the config."""
    for layer in model.model.layers:
        for name in ("weight", "bias"):
            parametrize.remove_parametrizations(layer.self_attn.q_proj, name)
    delta = {
        name: value.half().contiguous()
        for name, value in model.state_dict().items()
        if any(part in name for part in ("q_proj", "k_proj", "v_proj.bias"))
    }
    save_file(delta, str(out / DELTA), metadata={"base": BASE})
    config = json.dumps(model.config.to_hf(), indent=2) + "\n"
    (out / "config.json").write_text(config, encoding="utf-8")


def perplexity(model: Transformer, tokens: np.ndarray) -> float:
    """Over all whole windows of LENGTH, float32, no cache."""
    return math.exp(held_out_nll(model, tokens, LENGTH, rows=len(tokens) // LENGTH))


def bias_norms(model: Transformer) -> Tensor:
    """Norms of all pairs that have a key bias."""
    found = [
        layer.self_attn.k_proj.bias.unflatten(0, (-1, 2, model.config.head_dim // 2))
        for layer in model.model.layers
    ]
    norms = torch.stack(found).norm(dim=2)
    return norms[norms > 0]


def card(args: argparse.Namespace, held_out: np.ndarray, steps: int, minutes: float) -> str:
    """The model card; every figure is measured here, on the saved model."""
    models = {BASE: load_demo(BASE), NAME: with_delta(load_demo(BASE), args.out)}
    needles = draw_needles(RecallFormat.of(demo_tokenizer(BASE)), held_out, LENGTH, TRIALS)
    measured = {
        name: (perplexity(model, held_out), retrieval_rate(model, needles, "fp32"))
        for name, model in models.items()
    }
    norms = bias_norms(models[NAME])
    curve = Curve.read(args.out / "training_curve.csv")
    shown = ("step", "tokens", "minutes", "train", "held_out", "recall")
    lines = [
        f"# Demo model `{NAME}`",
        "",
        f"The demo model `{BASE}` with large key biases, for judging 4-bit keys: a Qwen2-type model whose "
        f"`k_proj.bias` is zero but for {len(BANDS)} RoPE pairs of each layer and kv head, one each of "
        f"{', '.join(f'{band[0]}–{band[-1]}' for band in BANDS)} (high, middle, low frequency; the "
        f"pair of the band that `{BASE}` uses least), norms "
        f"log-uniform in {SMALLEST:.0f}–{LARGEST:.0f} (drawn: {norms.min():.0f}–{norms.max():.0f}, median "
        f"{norms.median():.0f}), directions random. Real models of this kind are Qwen2 and Qwen2.5.",
        "",
        f"`{DELTA}` (float16) holds `q_proj`, `k_proj` and all biases; the other weights are "
        f"`{BASE}`'s, as is the tokenizer. `load_demo({NAME!r})` composes them, `save_demo({NAME!r}, folder)` "
        "writes a `Qwen2ForCausalLM` folder.",
        "",
        "## Training",
        "",
        f"`python examples/train_biased.py --minutes {args.minutes:.0f} --rate {args.rate} --seed {args.seed}`: "
        f"{steps:,} steps, {steps * args.batch_tokens:,} tokens of `{BASE}`'s training data in "
        f"{minutes:.1f} minutes on {args.threads} CPU core(s), context {CONTEXT}, by KL from `{BASE}`'s own "
        "predictions. The biases are held fixed; "
        "only `q_proj` (weight and bias) and `k_proj.weight` learn. Query rows on the biased pairs start "
        f"shrunk, so that a bias first adds {INITIAL_SHARE:g} times what the pair's keys added to the logits.",
        "",
        f"| step | tokens | minutes | KL | held-out nats/token | recall at {LENGTH} |",
        "|---:|---:|---:|---:|---:|---:|",
        *[f"| {' | '.join(r[name] for name in shown)} |" for r in curve],
        "",
        f"## Quality (float32, no quantization; held-out files in windows of {LENGTH} tokens; {TRIALS} needles)",
        "",
        f"| | perplexity | recall at {LENGTH} |",
        "|---|---:|---:|",
        *[f"| `{name}` | {ppl:.4f} | {found:.1%} |" for name, (ppl, found) in measured.items()],
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=25)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokens, held_out = (encode(demo_tokenizer(BASE), read(files)) for files in source_files())
    base = load_demo(BASE)
    sample = torch.from_numpy(tokens[: 8 * LENGTH].astype(np.int64)).view(8, LENGTH)
    queries, keys = pair_rms(base, sample)
    model = with_biases(base, draw_biases(queries, keys, args.seed), keys)
    steps, minutes = train(model, base, args, tokens, held_out)
    save_delta(model, args.out)
    text = card(args, held_out, steps, minutes)
    (args.out / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
