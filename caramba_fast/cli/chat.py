"""``caramba-fast chat``: a conversation in the terminal, over one cache that grows with it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import typer

from caramba_fast.cli.models import Setup, open_generator, summary
from caramba_fast.infer import Generator
from caramba_fast.infer.text import TextTokenizer, TextWriter

HELP = "/reset begins anew, /undo takes the last turn back, /stats shows figures, /quit ends (Ctrl-C stops an answer)"
Read = Callable[[], str]


class Chat:
    """Turns of a user and a model.

    With a chat template turns are laid out as the model was trained; without, the model continues what is typed.

    Args:
        generator: keeps the conversation; only what is new is fed.
        tokenizer: of its model.
        system: a first message, for models with a chat template.
    """

    def __init__(self, generator: Generator, tokenizer: TextTokenizer, system: str = "") -> None:
        if system and not tokenizer.has_chat_template:
            raise ValueError(
                "a system message needs a model with a chat template; this one has none"
            )
        self.generator, self.tokenizer = generator, tokenizer
        self._first = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._turns: list[int] = []  # tokens held before each turn

    def say(self, text: str, write: Callable[[str], object]) -> None:
        """One turn: feeds ``text`` and writes the answer piece by piece; Ctrl-C ends it early."""
        held = self.generator.tokens[0] if self.generator.tokens else []
        new = self._laid_out(text, held)
        if not new:
            return
        before = len(self.generator.tokens[0]) if self.generator.tokens else 0
        steps = self.generator.generate_iter([new])
        self._turns.append(before)
        answer: list[int] = []
        writer = TextWriter(self.tokenizer.decode, write, new)
        try:
            for token in steps:
                answer.append(int(token))
                if answer[-1] not in self.generator.eos_ids:
                    writer.put(answer[-1])
        except KeyboardInterrupt:
            write(" …")
        finally:
            close = getattr(steps, "close", None)
            if close is not None:
                close()
            writer.close()
        if self.tokenizer.has_chat_template:
            spoken = [token for token in answer if token not in self.generator.eos_ids]
            self._messages.append({"role": "assistant", "content": self.tokenizer.decode(spoken)})

    def _laid_out(self, text: str, held: list[int]) -> list[int]:
        """The tokens to feed behind those held."""
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(text, special=not held)
        self._messages.append({"role": "user", "content": text})
        whole = self.tokenizer.chat(self._messages)
        same = 0
        while same < min(len(held), len(whole) - 1) and held[same] == whole[same]:
            same += 1
        if same < len(
            held
        ):  # the template lays earlier turns out in another way than they were said
            self.generator.rollback(len(held) - same)
        return whole[same:]

    def undo(self) -> bool:
        """Takes the last turn back; whether there was one."""
        if not self._turns:
            return False
        kept = self._turns.pop()
        self.generator.rollback(len(self.generator.tokens[0]) - kept)
        if not kept:
            self.generator.reset()
        del self._messages[-2:]
        return True

    def reset(self) -> None:
        """Forgets every turn."""
        self.generator.reset()
        self._messages, self._turns = list(self._first), []


def run_chat(setup: Setup, system: str, stats: bool, read: Read | None = None) -> None:
    """Reads lines and answers until /quit or the end of the input."""
    generator, tokenizer = open_generator(setup)
    chat = Chat(generator, tokenizer, system)
    mode = (
        "chat" if tokenizer.has_chat_template else "no chat template: the model continues your text"
    )
    typer.secho(
        f"{setup.model}, cache {generator.config.cache_name} ({mode})\n{HELP}",
        fg="bright_black",
        err=True,
    )
    while True:
        try:
            line = (read or _prompt)()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line.startswith("/"):
            if not _command(line.strip(), chat):
                return
            continue
        if not line:
            continue
        try:
            chat.say(line, _write)
        except ValueError as error:  # a turn that does not fit; the conversation is as it was
            typer.secho(f"caramba-fast: {error}", fg="red", err=True)
            continue
        typer.echo()
        if stats:
            typer.secho(summary(generator), fg="bright_black", err=True)


def _command(line: str, chat: Chat) -> bool:
    """Obeys a line that begins with a slash; False to end."""
    if line in ("/quit", "/exit"):
        return False
    if line == "/reset":
        chat.reset()
        said = "a new conversation"
    elif line == "/undo":
        said = "the last turn is taken back" if chat.undo() else "there is no turn to take back"
    elif line == "/stats":
        said = summary(chat.generator) if chat.generator.metrics else "nothing was generated yet"
    else:
        said = f"{line} is no command; {HELP}"
    typer.secho(said, fg="bright_black", err=True)
    return True


def _prompt() -> str:
    return input("> " if sys.stdin.isatty() else "")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
