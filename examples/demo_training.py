"""Shared parts of the demo models' training scripts: optimizers, losses, checks, the training curve."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from caramba_fast.models import Transformer
from caramba_fast.quality.needles import RecallFormat, needle_prompt


class Optimizers:
    """Muon for the matrices of the blocks, AdamW for the rest; frozen parameters stay out."""

    def __init__(self, model: Transformer, rate: float) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.rate = rate
        matrices = [p for n, p in named if p.ndim == 2 and "layers" in n]
        rest = [p for n, p in named if not (p.ndim == 2 and "layers" in n)]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, loss: Tensor, factor: float) -> None:
        """Descends on ``loss`` at ``factor`` times the rate, gradients clipped to norm 1."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = self.rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def rate_factor(step: int, progress: float, warmup_steps: int, decay_from: float) -> float:
    """Linear warm-up, flat, then linear decay to a fiftieth."""
    decay = 1.0 if progress < decay_from else (1.0 - progress) / (1.0 - decay_from)
    return min(1.0, (step + 1) / warmup_steps) * max(decay, 0.02)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy over tokens of unequal weight."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return (loss * weights.flatten()).sum() / weights.sum()


@torch.no_grad()
def held_out_nll(model: Transformer, tokens: np.ndarray, length: int, rows: int = 8) -> float:
    """Mean nats per token over ``rows`` evenly spaced spans."""
    starts = np.linspace(0, len(tokens) - length - 2, rows).astype(int)
    total = 0.0
    for start in starts:
        row = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))
        total += float(F.cross_entropy(model(row[None, :-1])[0], row[1:]))
    return total / rows


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


class Curve:
    """``training_curve.csv``: one row per report; a resumed run continues it.

    Args:
        path: the file; created if missing.
        upto: steps already done; later rows are dropped, because the run writes them again.
    """

    COLUMNS = ("step", "tokens", "minutes", "context", "train", "held_out", "recall")

    def __init__(self, path: Path, upto: int = 0) -> None:
        kept = [row for row in self.read(path) if int(row["step"]) <= upto] if upto else []
        self._file = path.open("w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, self.COLUMNS, lineterminator="\n")
        self._writer.writeheader()
        self._writer.writerows(kept)
        self._file.flush()

    @staticmethod
    def read(path: Path) -> list[dict[str, str]]:
        """All rows of a curve."""
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def add(
        self,
        step: int,
        tokens: int,
        minutes: float,
        context: int,
        losses: list[float],
        nll: float,
        recall: float,
    ) -> None:
        """Writes and prints one report; ``losses`` are those since the last one."""
        shown = (f"{minutes:.1f}", context, f"{np.mean(losses):.4f}", f"{nll:.4f}", f"{recall:.3f}")
        row = (step, tokens, *shown)
        self._writer.writerow(dict(zip(self.COLUMNS, row, strict=True)))
        self._file.flush()
        print(*row, flush=True)
