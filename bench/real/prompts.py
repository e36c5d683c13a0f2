"""Caches after short or odd prompts: ``python -m caramba_fast.bench.real.prompts``, part of `make real`.

Settings chosen on ordinary text could fail where a prompt is one token, one token repeated, or whitespace. Measures
KL(fp16 ‖ cache) on text that follows each of them, mean over all positions after the prompt. Writes
``bench/results/real/<model>-prompts.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence

import numpy as np
import torch

from caramba_fast.bench.real import specs as chosen
from caramba_fast.bench.real.models import MEASURED, FetchError, model_folder, title
from caramba_fast.bench.real.study import add_options, file_name, out_folder
from caramba_fast.bench.real.text import TextError, windows
from caramba_fast.cli.quality import Subject, load_subject
from caramba_fast.quality import cached_forward
from caramba_fast.quality.compare import compare
from caramba_fast.quality.needles import token_ids

#: Texts after each prompt, half of each kind, and scored tokens of each.
TEXTS, TOKENS = 4, 192
Make = Callable[[Subject, np.ndarray], np.ndarray]


def _words(text: str, count: int) -> Make:
    """A text repeated to so many tokens."""
    return lambda subject, _: np.resize(token_ids(subject.tokenizer, text), count)


def _random(subject: Subject, ids: np.ndarray) -> np.ndarray:
    return np.random.default_rng(int(ids[0])).integers(0, subject.model.vocab_size, 96)


#: Makes each prompt from the model and the text that follows.
PROMPTS: dict[str, Make] = {
    "1 token": lambda _, ids: ids[:1],
    "1 token, 64 times": lambda _, ids: np.resize(ids[:1], 64),
    "2 tokens in turn, 64": lambda _, ids: np.resize(ids[:2], 64),
    "a line of 12 tokens, 25 times": lambda _, ids: np.resize(ids[:12], 300),
    "line breaks and blanks, 200": _words("\n\n        \n    \n\t\t\n \n", 200),
    "a picture of stars and blanks, 200": _words("*       *  **      ***\n", 200),
    "digits, 96": _words("0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ", 96),
    "random tokens, 96": _random,
    "64 tokens of text": lambda _, ids: ids[:64],
}


def study(
    subject: Subject, specs: Sequence[str], count: int = TEXTS, tokens: int = TOKENS
) -> dict[str, dict[str, float]]:
    """Mean KL in nats by prompt and spec, over ``count`` texts of ``tokens`` scored tokens after each prompt.

    Raises TextError if the texts are missing, ValueError for a spec that is unknown or does not fit the model.
    """
    longest = 300 + tokens
    rows = windows(
        lambda text: token_ids(subject.tokenizer, text).tolist(), longest, count, "held out"
    )
    forward = cached_forward(subject.model)
    found = {}
    for name, make in PROMPTS.items():
        prompts = np.stack([make(subject, row) for row in rows])
        # A prompt may be the first tokens of its text: what is scored begins after the longest one.
        ids = torch.from_numpy(np.concatenate((prompts, rows[:, 300:]), axis=1))
        scored = np.arange(prompts.shape[1], ids.shape[1] - 1)
        positions = np.tile(scored, (count, 1))
        scores = compare(forward, ids, specs, chosen.BASELINE, positions)
        found[name] = {spec: float(scores[spec].kl.mean()) for spec in specs}
        shown = ", ".join(f"{spec} {1000 * kl:.2f}" for spec, kl in found[name].items())
        print(f"{name}: {shown}", flush=True)
    return found


def main() -> None:
    """Parses the command line and runs the study."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    add_options(parser, chosen.PROMPTED)
    args = parser.parse_args()
    out = out_folder(args)
    for model in args.models or MEASURED:
        try:
            subject = load_subject(str(model_folder(model)), "cpu")
            kl = study(subject, args.specs, 2 if args.quick else TEXTS)
        except (FetchError, TextError, ValueError) as error:
            parser.exit(1, f"{model}: {error}\n")
        about = {"title": title(model), "name": file_name(model), "texts": TEXTS, "tokens": TOKENS}
        path = out / f"{file_name(model)}-prompts.json"
        path.write_text(json.dumps({"about": about, "kl": kl}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
