"""Greedy answers of a model through a cache, stored group by group so that an interrupted run can be resumed.

The common prefix of a group's prompts is fed once, and every prompt continues from a copy of that cache, as in a server
with prefix sharing. Steps are those of `Generator`, so that the decode kernels read the cache.
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
from caramba_fast.config.files import read_json
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.quality import cached_forward
from caramba_fast.quality.identity import digest_of
from caramba_fast.writing import replacing

Tokens = list[int]
#: Rows decoded together.
ROWS = 10


@dataclass(frozen=True)
class Group:
    """Prompts that are answered and stored together.

    Attributes:
        prompts: token ids.
        new_tokens: most tokens of an answer.
        stop: strings that end an answer.
        ignore_eos: whether an answer continues after the end of the text.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


def shared(prompts: Sequence[Sequence[int]]) -> int:
    """Length of the common prefix of all prompts; each keeps at least one token of its own."""
    most = min(map(len, prompts)) - 1
    first = prompts[0]
    return next(
        (i for i in range(most) if any(prompt[i] != first[i] for prompt in prompts)), max(most, 0)
    )


@torch.no_grad()
def answers(subject: Subject, tokenizer: TextTokenizer, spec: str, group: Group) -> list[Tokens]:
    """The tokens that follow each prompt, greedily, the end of the text and stop strings included.

    ``spec`` is a cache spec or a name of `KIVI`; ValueError if it is neither, or does not fit the model.
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
        if count:  # copies of its rows: the shared cache is unchanged
            session.go_back(cache, rows)
            session.select_rows([0] * len(some))
        generator.generate(some)
        found += [
            row[count + len(prompt) :] for row, prompt in zip(generator.tokens, some, strict=True)
        ]
    return found


class AnswerStore:
    """Answers by model (weights included), cache and group, stored in a folder, which is made if missing."""

    def __init__(self, folder: Path, subject: Subject) -> None:
        self.folder, self.subject = folder, subject
        self.tokenizer = TextTokenizer.of(subject.name)
        self._identity = cached_forward(subject.model).identity
        folder.mkdir(parents=True, exist_ok=True)

    def answers(self, task: str, spec: str, group: Group) -> tuple[list[Tokens], float]:
        """The answer to each prompt and its seconds, from the folder if stored there.

        Raises ValueError as `answers`, or for a damaged file.
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
        parts = [self._identity, str(ROWS), repr(group), *stored]  # the meaning of "q4" may change
        return self.folder / f"{task}-{digest_of(parts, 16)}.json"
