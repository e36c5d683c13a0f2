"""Trains a demo model from nothing but the Python standard library's source.

    python examples/train_demo.py --architecture gqa --out runs/demo-gqa
    python examples/train_demo.py --architecture dba --out runs/demo-dba
    python examples/train_demo.py --architecture dba --init runs/demo-dba --out runs/more --rate 2e-3

Muon for the matrices of the blocks, AdamW for the rest; bfloat16 autocast; context 512, then 1024,
then 2048 tokens, the distance of recall pairs growing with it. Writes a Hugging Face checkpoint
folder (fp16) and ``training_curve.csv``. A stopped run resumes from its last state.
``--init`` is a warm restart: the weights and curve of a finished run, new optimizers, a new budget.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from demo_data import EOS, PAD, RecallMixer, encode, read, source_files, train_tokenizer
from demo_training import (
    Curve,
    Optimizers,
    held_out_nll,
    rate_factor,
    recall_rate,
    weighted_loss,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer

from caramba_fast.models import ModelConfig, Transformer, load_model
from caramba_fast.quality import RecallFormat

VOCAB_SIZE = 2048
#: (share of the run after which it holds, context length)
CURRICULUM = ((0.0, 512), (0.55, 1024), (0.75, 2048))
RESTART_CURRICULUM = ((0.0, 1024), (0.75, 2048))
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


@dataclass
class Progress:
    """Progress of a run; ``step``, ``tokens`` and ``minutes`` include those of ``--init``.

    Attributes:
        step: optimizer steps made.
        tokens: tokens seen.
        minutes: time spent.
        first: (step, tokens, minutes) of the weights the run began with.
    """

    step: int = 0
    tokens: int = 0
    minutes: float = 0.0
    first: tuple[int, int, float] = (0, 0, 0.0)

    @classmethod
    def after(cls, curve: Path) -> Progress:
        """Where the run that wrote ``curve`` ended."""
        last = Curve.read(curve)[-1]
        done = int(last["step"]), int(last["tokens"]), float(last["minutes"])
        return cls(*done, done)

    @property
    def steps_here(self) -> int:
        """Steps since the optimizers were new."""
        return self.step - self.first[0]

    def share(self, args: argparse.Namespace) -> float:
        """Of this run's budget, how much is used."""
        if args.tokens:
            return (self.tokens - self.first[1]) / args.tokens
        return (self.minutes - self.first[2]) / args.minutes


class Run:
    """One training run: its state, saving and resuming."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.state_path = self.out / "state.pt"
        resumed = self.state_path.exists()
        if args.init and not resumed:
            for name in ("tokenizer.json", "training_curve.csv"):
                shutil.copyfile(args.init / name, self.out / name)
        self.tokenizer, tokens, self.held_out = prepare(self.out)
        self.form = RecallFormat.of(self.tokenizer)
        self.mixer = RecallMixer(tokens, self.form, args.seed)
        self.model = Transformer(demo_config(args.architecture))
        self.optimizers = Optimizers(self.model, args.rate)
        self.progress = Progress()
        if resumed:
            self._resume()
        elif args.init:
            self.model.load_state_dict(load_model(args.init).state_dict())
            self.progress = Progress.after(args.init / "training_curve.csv")
        if self.progress.step:
            self.mixer.rng = np.random.default_rng((args.seed, self.progress.step))
        self.curve = Curve(self.out / "training_curve.csv", self.progress.step)
        size = sum(p.numel() for p in self.model.parameters())
        print(f"{size:,} parameters, {len(tokens):,} tokens, {len(self.form.words)} recall words")

    def _resume(self) -> None:
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers.parts, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])

    def keep(self) -> None:
        """Saves the checkpoint folder and everything needed to resume."""
        partial = self.state_path.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers.parts],
            "progress": asdict(self.progress),
        }
        torch.save(state, partial)
        partial.replace(self.state_path)
        save(self.model, self.out)

    def report(self, length: int, losses: list[float]) -> None:
        """One row of the curve."""
        self.model.eval()
        nll = held_out_nll(self.model, self.held_out, length)
        recall = recall_rate(self.model, self.form, self.held_out, length // 2)
        self.model.train()
        done = self.progress
        self.curve.add(done.step, done.tokens, done.minutes, length, losses, nll, recall)
        losses.clear()


def train(args: argparse.Namespace) -> None:
    """Trains until the budget is used up."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    run = Run(args)
    compiled = torch.compile(run.model, dynamic=False) if args.compile else run.model
    done, losses = run.progress, []
    restarted = done.first[0] > 0
    curriculum, decay_from = (RESTART_CURRICULUM, 0.0) if restarted else (CURRICULUM, DECAY_FROM)
    saved_at = clock = time.monotonic()
    while (share := done.share(args)) < 1.0:
        length = [size for begins, size in curriculum if share >= begins][-1]
        rows, weights = run.mixer.batch(args.batch_tokens // length, length, length)
        batch = torch.from_numpy(rows)
        with torch.autocast("cpu", torch.bfloat16):
            logits = compiled(batch[:, :-1])
        loss = weighted_loss(logits, batch[:, 1:], torch.from_numpy(weights))
        run.optimizers.step(loss, rate_factor(done.steps_here, share, WARMUP_STEPS, decay_from))
        losses.append(float(loss.detach()))
        now = time.monotonic()
        done.step, done.tokens = done.step + 1, done.tokens + args.batch_tokens
        done.minutes, clock = done.minutes + (now - clock) / 60, now
        if done.step % args.report == 0:
            run.report(length, losses)
        if now - saved_at > 300:
            saved_at = now
            run.keep()
    save(run.model, run.out)
    print("saved", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="gqa")
    parser.add_argument("--init", type=Path, help="checkpoint folder to train on from")
    parser.add_argument("--minutes", type=float, default=80.0)
    parser.add_argument("--tokens", type=int, help="train for so many tokens instead of minutes")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report", type=int, default=50)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
