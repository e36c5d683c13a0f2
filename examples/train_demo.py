"""Trains a demo model from nothing but the Python standard library's source.

    python examples/train_demo.py --architecture gqa --out runs/demo-gqa
    python examples/train_demo.py --architecture dba --out runs/demo-dba

Muon for the matrices of the blocks, AdamW for the rest; bfloat16 autocast; context 512, then 1024,
then 2048 tokens, the distance of recall pairs growing with it. Writes a Hugging Face checkpoint
folder (fp16) and ``training_curve.csv``. A run that was stopped goes on from its last state.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import EOS, PAD, RecallMixer, encode, read, source_files, train_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from caramba_fast.models.config import ModelConfig
from caramba_fast.models.transformer import Transformer
from caramba_fast.quality.recall import RecallFormat, needle_prompt

VOCAB_SIZE = 2048
#: (share of the run after which it holds, context length)
CURRICULUM = ((0.0, 512), (0.55, 1024), (0.75, 2048))
WARMUP_STEPS, DECAY_FROM = 100, 0.4


#: The two architectures, 3.5 million parameters each.
ARCHITECTURES: dict[str, dict[str, object]] = {
    "gqa": {"model_type": "llama", "intermediate_size": 704, "num_key_value_heads": 2},
    "dba": {
        "model_type": "caramba_dba",
        "intermediate_size": 816,
        "num_key_value_heads": 4,
        "decoupled": {"sem_dim": 32, "geo_dim": 64, "v_dim": 128},
    },
}


def demo_config(architecture: str) -> ModelConfig:
    """Four layers of width 256; GQA: two query heads to a kv head of 64."""
    return ModelConfig(
        **ARCHITECTURES[architecture],
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=1,
        pad_token_id=0,
    )


def prepare(out: Path) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Tokenizer, training tokens, held-out tokens; the tokenizer is kept in ``out``."""
    train, held_out = source_files()
    path = out / "tokenizer.json"
    if path.exists():
        tokenizer = Tokenizer.from_file(str(path))
    else:
        tokenizer = train_tokenizer(read(train[::3]), VOCAB_SIZE)
        tokenizer.save(str(path))
    return tokenizer, encode(tokenizer, read(train)), encode(tokenizer, read(held_out))


def optimizers(model: Transformer, rate: float) -> list[torch.optim.Optimizer]:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_factor(step: int, progress: float) -> float:
    """Linear warm-up, flat, then linear decay to a fiftieth."""
    decay = 1.0 if progress < DECAY_FROM else (1.0 - progress) / (1.0 - DECAY_FROM)
    return min(1.0, (step + 1) / WARMUP_STEPS) * max(decay, 0.02)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def held_out_nll(model: Transformer, tokens: np.ndarray, length: int, rows: int = 8) -> float:
    """Mean nats per token over ``rows`` evenly spaced stretches."""
    starts = np.linspace(0, len(tokens) - length - 2, rows).astype(int)
    batch = torch.from_numpy(
        np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64)
    )
    logits = model(batch[:, :-1])
    return float(F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()))


@torch.no_grad()
def recall_rate(
    model: Transformer, form: RecallFormat, tokens: np.ndarray, distance: int, trials: int = 32
) -> float:
    """Share of needles answered exactly at ``distance`` tokens, chance being 1 / words."""
    rng = np.random.default_rng(distance)
    hits = 0
    for _ in range(trials):
        start = rng.integers(len(tokens) - distance - 64)
        prompt, value = needle_prompt(form, tokens[start : start + distance + 64], distance, rng)
        logits = model(torch.from_numpy(prompt)[None], logits_index=torch.tensor([len(prompt) - 1]))
        hits += int(logits[0, 0].argmax()) == value
    return hits / trials


def save(model: Transformer, out: Path) -> None:
    """A folder that AutoModelForCausalLM and AutoTokenizer load."""
    tied = model.config.tie_word_embeddings
    state = {
        name: value.half().contiguous()
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    files = {
        "config.json": model.config.to_hf(),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": EOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "model_max_length": model.config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _forget_after(path: Path, step: int) -> None:
    """Drops the rows of the curve that a resumed run will write again."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [head, *(r for r in rows if int(r[0]) <= step)]
        )


def train(args: argparse.Namespace) -> None:
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer, tokens, held_out = prepare(out)
    form = RecallFormat.of(tokenizer)
    mixer = RecallMixer(tokens, form, args.seed)
    model = Transformer(demo_config(args.architecture))
    compiled = torch.compile(model, dynamic=False) if args.compile else model
    chosen = optimizers(model, args.rate)
    step, spent, state_path = 0, 0.0, out / "state.pt"
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(chosen, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, spent = state["step"], state["spent"]
        mixer.rng = np.random.default_rng((args.seed, step))
        _forget_after(out / "training_curve.csv", step)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size:,} parameters, {len(tokens):,} tokens, {len(form.words)} recall words", flush=True
    )
    curve = (out / "training_curve.csv").open("a", newline="", encoding="utf-8")
    writer = csv.writer(curve)
    if not step:
        writer.writerow(["step", "tokens", "minutes", "context", "train", "held_out", "recall"])
    began, seen, losses = time.monotonic() - spent, step * args.batch_tokens, []
    saved_at = time.monotonic()
    while (progress := (time.monotonic() - began) / (60 * args.minutes)) < 1.0:
        length = [size for share, size in CURRICULUM if progress >= share][-1]
        rows, weights = mixer.batch(args.batch_tokens // length, length, length)
        batch, weight = torch.from_numpy(rows), torch.from_numpy(weights)
        for optimizer in chosen:
            for group in optimizer.param_groups:
                group["lr"] = args.rate * rate_factor(step, progress)
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(batch[:, :-1])
        loss = weighted_loss(logits, batch[:, 1:], weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        step, seen = step + 1, seen + args.batch_tokens
        if step % args.report == 0:
            model.eval()
            nll = held_out_nll(model, held_out, length)
            recall = recall_rate(model, form, held_out, length // 2)
            model.train()
            minutes = (time.monotonic() - began) / 60
            row = [
                step,
                seen,
                f"{minutes:.1f}",
                length,
                f"{np.mean(losses):.4f}",
                f"{nll:.4f}",
                f"{recall:.3f}",
            ]
            writer.writerow(row)
            curve.flush()
            print(*row, flush=True)
            losses.clear()
        if time.monotonic() - saved_at > 300:
            saved_at = time.monotonic()
            partial = state_path.with_suffix(".part")
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in chosen],
                    "step": step,
                    "spent": time.monotonic() - began,
                },
                partial,
            )
            partial.replace(state_path)
            save(model, out)
    save(model, out)
    print("saved", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="gqa")
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=100)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
