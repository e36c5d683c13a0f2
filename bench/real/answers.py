"""Greedy answers of a model through a cache, kept part by part so that an interrupted run goes on.

Prompts that begin alike are computed alike: what all prompts of a group share is fed once, and every prompt goes on
from a copy of that cache, which is what a server does with a shared prefix. Steps are those of `Generator`, so that
the cache is read by the decode kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba_fast import Generator
from caramba_fast.bench.real.kivi import with_kivi
from caramba_fast.bench.real.specs import KIVI
from caramba_fast.cli.quality import Subject
from caramba_fast.config import cache_configs
from caramba_fast.config.files import read_json, replacing
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.quality import cached_forward
from caramba_fast.quality.identity import digest_of

Tokens = list[int]
#: Rows decoded at once.
ROWS = 10


@dataclass(frozen=True)
class Group:
    """Prompts that are answered together and kept together.

    Attributes:
        prompts: token ids.
        new_tokens: most tokens of an answer.
        stop: strings that end an answer.
        ignore_eos: whether an answer goes on behind the end of the text.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def shared(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts have in common; each keeps one of its own at least."""
    most = min(map(len, prompts)) - 1
    first = prompts[0]
    return next(
        (i for i in range(most) if any(prompt[i] != first[i] for prompt in prompts)), max(most, 0)
    )


@torch.no_grad()
def answers(subject: Subject, tokenizer: TextTokenizer, spec: str, group: Group) -> list[Tokens]:
    """The tokens that follow each prompt, greedily, the end of the text and stop strings included.

    Args:
        subject: the model.
        tokenizer: its tokenizer, which stop strings need.
        spec: how the cache is stored, or a name of `KIVI`.
        group: the prompts.

    Raises:
        ValueError: a spec that is none, or does not fit the model.
    """
    prompts = [list(prompt) for prompt in group.prompts]
    count = shared(prompts) if len(prompts) > 1 else 0
    model: Any = subject.model
    if spec in KIVI:
        model, spec = with_kivi(model, KIVI[spec]), "fp16"
    generator = Generator(
        model, tokenizer=tokenizer, cache_kind=spec, do_sample=False, return_dict=True,
        max_new_tokens=group.new_tokens, stop=group.stop, ignore_eos=group.ignore_eos,
        max_seq_len=max(map(len, prompts)) + group.new_tokens,
    )  # fmt: skip
    session = generator._session
    if count:
        generator.prefill([prompts[0][:count]])
    cache, rows = session.cache, session.rows
    found: list[Tokens] = []
    for start in range(0, len(prompts), ROWS):
        some = [prompt[count:] for prompt in prompts[start : start + ROWS]]
        generator.reset()
        if count:  # rows of their own: the shared cache stays as it is
            session.go_back(cache, rows)
            session.select_rows([0] * len(some))
        generator.generate(some)
        found += [
            row[count + len(prompt) :] for row, prompt in zip(generator.tokens, some, strict=True)
        ]
    return found


class AnswerStore:
    """Answers by model, cache and group, in a folder.

    Args:
        folder: where they are kept; made if missing.
        subject: the model, whose weights are part of a name.
    """

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self.subject = folder, subject
        self.tokenizer = TextTokenizer.of(subject.name)
        self._identity = cached_forward(subject.model).identity
        folder.mkdir(parents=True, exist_ok=True)

    def answers(self, task: str, spec: str, group: Group) -> tuple[list[Tokens], float]:
        """The answer to each prompt and its seconds; read from the folder if saved there.

        Raises:
            ValueError: as `answers`, or a file of the folder that is damaged.
        """
        file = self._file(task, spec, group)
        if file.is_file():
            kept = read_json(file)
            if len(kept.get("answers", ())) != len(group.prompts):
                raise ValueError(f"{file} is damaged; remove it to have it made again")
            return kept["answers"], kept["seconds"]
        began = time.perf_counter()
        found = answers(self.subject, self.tokenizer, spec, group)
        seconds = round(time.perf_counter() - began, 1)
        with replacing(file) as stream:
            content = {"spec": spec, "seconds": seconds, "answers": found}
            stream.write(f"{json.dumps(content)}\n".encode())
        return found, seconds

    def _file(self, task: str, spec: str, group: Group) -> Path:
        configs = {} if spec in KIVI else cache_configs(spec)
        stored = [f"{name} {c.model_dump_json()}" for name, c in configs.items()] or [spec]
        parts = [self._identity, str(ROWS), repr(group), *stored]  # what "q4" means may change
        return self.folder / f"{task}-{digest_of(parts, 16)}.json"
