"""Training data of the demo models: the standard library's source, mixed with recall lines.

The text is the source of the running Python (PSF licence), found with ``sysconfig``. One file in
fifty is held out, chosen by a hash of its path. Recall lines (`caramba_fast.quality.needles`) are
put between lines of code; the maximum distance of a pair grows with the curriculum.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from caramba_fast.quality.needles import RecallFormat

PAD, EOS = "<|pad|>", "<|endoftext|>"
LARGEST_FILE = 300_000


def source_files() -> tuple[list[Path], list[Path]]:
    """Files to train on and files held out, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or not 200 < path.stat().st_size < LARGEST_FILE:
            continue
        digest = int(hashlib.sha256(name.encode()).hexdigest(), 16)
        (held_out if digest % 50 == 0 else train).append(path)
    return train, held_out


def read(paths: list[Path]) -> Iterator[str]:
    """The files that are valid UTF-8, as text (a few tests of the codecs are not)."""
    for path in paths:
        raw = path.read_bytes()
        try:
            yield raw.decode("utf-8")
        except UnicodeDecodeError:
            continue


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits; id 0 pads, id 1 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Iterator[str]) -> np.ndarray:
    """All documents in one (N,) uint16 array, each closed by the end-of-text token."""
    eos = tokenizer.token_to_id(EOS)
    batch = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.asarray([*item.ids, eos], dtype=np.uint16) for item in batch])


class RecallMixer:
    """Draws training rows: code with recall pairs in between, and a weight for every token."""

    PLAIN_SHARE = 0.2
    PAIRS_PER_512 = 8
    VALUE_WEIGHT, NOISE_WEIGHT = 4.0, 0.2

    def __init__(self, tokens: np.ndarray, form: RecallFormat, seed: int) -> None:
        self.tokens, self.form = tokens, form
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, length: int, furthest: int) -> tuple[np.ndarray, np.ndarray]:
        """tokens (rows, length + 1) int64 and weights (rows, length) float32 of the targets."""
        drawn = [self._row(length + 1, furthest) for _ in range(rows)]
        tokens, weights = (np.stack(part) for part in zip(*drawn, strict=True))
        return tokens, weights[:, 1:]

    def _row(self, length: int, furthest: int) -> tuple[np.ndarray, np.ndarray]:
        plain = self.rng.random() < self.PLAIN_SHARE
        pairs = 0 if plain else max(1, length * self.PAIRS_PER_512 // 512)
        size = length - 2 * pairs * self.form.line_length
        start = self.rng.integers(len(self.tokens) - size)
        code = self.tokens[start : start + size].astype(np.int64)
        line_starts = np.flatnonzero(code == self.form.suffix[-1]) + 1
        if not pairs or not len(line_starts):
            code = self.tokens[start : start + length].astype(np.int64)
            code = np.resize(code, length)
            return code, np.ones(length, np.float32)
        return self._weave(code, line_starts, pairs, furthest * size // length)

    def _weave(
        self, code: np.ndarray, line_starts: np.ndarray, pairs: int, furthest: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Puts each pair's definition and question at line starts a drawn distance apart."""
        rng, size = self.rng, len(code)
        far = min(furthest, size - 1)
        logarithmic = np.exp(rng.uniform(np.log(4), np.log(far), pairs))
        distance = np.where(rng.random(pairs) < 0.5, logarithmic, rng.uniform(4, far, pairs))
        first = rng.uniform(0, size - distance)
        keys = rng.choice(self.form.words, pairs, replace=False)
        values = rng.choice(self.form.words, pairs)
        events = [(first[i], i, False) for i in range(pairs)]
        events += [(first[i] + distance[i], i, True) for i in range(pairs)]
        events.sort(key=lambda event: event[0])
        places = np.asarray([event[0] for event in events])
        slots = line_starts[np.searchsorted(line_starts, places).clip(max=len(line_starts) - 1)]
        pieces = np.split(code, slots)
        tokens, weights = [pieces[0]], [np.ones(len(pieces[0]), np.float32)]
        for (_, pair, asked), piece in zip(events, pieces[1:], strict=True):
            line = self.form.line(keys[pair], values[pair])
            weight = np.full(len(line), self.NOISE_WEIGHT, np.float32)
            weight[self.form.value_offset] = self.VALUE_WEIGHT if asked else 0.0
            tokens += [line, piece]
            weights += [weight, np.ones(len(piece), np.float32)]
        return np.concatenate(tokens), np.concatenate(weights)
