"""Parses the text of a compiled kernel: only the PTX that Triton writes; anything else raises an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

PARAM = re.compile(r"\.param \.\w(\d+) (?:\.ptr \.global \.align \d+ )?(\w+)")
DECLARED = re.compile(r"([%\w]+)(?:<(\d+)>)?\s*[,;]")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([\w.]+)\s*(.*)", re.DOTALL)
USED = re.compile(r'\.pragma "used_bytes_mask (\w+)"')


class FaultError(Exception):
    """Something that a GPU would not do, or not do the same way every time."""


@dataclass
class Instruction:
    """``guard`` is a predicate it depends on, if any; ``unless`` negates it.

    ``used`` is a mask of a load's bytes that are used, or None for all.
    """

    name: str
    operands: list[str]
    guard: str
    unless: bool
    used: int | None
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.name} {', '.join(self.operands)}"


@dataclass
class Program:
    """A kernel for so many threads: bytes of each parameter, bits of each register, and positions of labels."""

    threads: int
    params: dict[str, int]
    widths: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> Program:
    head, _, body = text.partition("\n{\n")
    params = {name: int(bits) // 8 for bits, name in PARAM.findall(head)}
    program = Program(int(re.findall(r"\.reqntid (\d+)", head)[0]), params)
    scopes, used, count = [dict[str, str]()], None, 0
    for number, part in _parts(body, head.count("\n") + 3):
        if part == "{":
            scopes.append({})
            count += 1
        elif part == "}":
            scopes.pop()
            if not scopes:
                break
        elif part.endswith(":"):
            program.labels[part[:-1]] = len(program.instructions)
        elif part.startswith(".reg"):
            _declare(part, program.widths, scopes, count)
        elif found := USED.fullmatch(part):
            used = int(found[1], 0)
        elif found := STATEMENT.fullmatch(part.replace("::cta", "")):  # the default of .shared
            # Those of the outermost scope, which are thousands, keep their names.
            known = {name: own for scope in scopes[1:] for name, own in scope.items()}
            renamed = re.sub(r"[%$\w]+", lambda x: known.get(x[0], x[0]), found[4])  # noqa: B023
            operands = [re.sub(r"\s", "", x) for x in OPERAND.findall(renamed)]
            guard = known.get(found[2], found[2] or "")
            program.instructions.append(
                Instruction(found[3], operands, guard, bool(found[1]), used, number)
            )
            used = None
        else:
            raise NotImplementedError(f"line {number}: {part}")
    return program


def _parts(body: str, start: int) -> Iterator[tuple[int, str]]:
    """Braces, labels, directives and instructions, with their lines."""
    pending = ""
    for number, line in enumerate(body.splitlines(), start):
        rest = re.sub(r"\s*//.*", "", line).strip()
        while rest and not rest.startswith(".loc"):
            if alone := not pending and re.match(r"[{}]|[$\w]+:", rest):
                part, rest = alone[0], rest[alone.end() :].strip()
            else:
                part, ended, rest = (x.strip() for x in rest.partition(";"))
                pending = f"{pending} {part}".strip()
                if not ended:
                    break
                part, pending = pending, ""
            yield number, part


def _declare(part: str, widths: dict[str, int], scopes: list[dict[str, str]], count: int) -> None:
    """Declares registers; those of an inner scope get unique names."""
    kind, names = part.split(None, 2)[1:]
    for stem, number in DECLARED.findall(names + ";"):
        for name in [f"{stem}{i}" for i in range(int(number))] if number else [stem]:
            own = scopes[-1][name] = name if len(scopes) == 1 else f"{name}@{count}"
            widths[own] = 1 if kind == ".pred" else int(kind[2:])
