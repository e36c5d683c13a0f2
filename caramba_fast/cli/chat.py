"""``caramba-fast chat``: a chat with a model in the terminal, over one cache, with undo."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError

from caramba_fast.cli.models import Setup, open_generator, summary
from caramba_fast.cli.options import show_error
from caramba_fast.infer import Generator
from caramba_fast.infer.saved import SavedSession, read_session
from caramba_fast.infer.saved_part import SessionError
from caramba_fast.infer.tokenizer import TextTokenizer, TextWriter

Write = Callable[[str], object]
Message = dict[str, str]


class Chat:
    """A conversation of a user and a model.

    With a chat template, the cache is truncated to the common prefix of its tokens and the formatted conversation. They
    may differ at the last answer: its end (an answer that was cut short has no end-of-sequence token, for example) and
    its tokenization. Nothing before the last answer is fed again. Without a template, the model continues the typed
    text, and its end-of-sequence token is removed from the cache.

    Raises:
        ValueError: a system message without a chat template, or one that the template refuses.
        ModuleNotFoundError: the package that renders templates is not installed.
    """

    def __init__(self, generator: Generator, tokenizer: TextTokenizer, system: str = "") -> None:
        if system and not tokenizer.has_chat_template:
            raise ValueError(
                "--system needs a model with a chat template; this one has none and continues your text"
            )
        self.generator, self.tokenizer = generator, tokenizer
        self._first = [_message("system", system)] if system else []
        self.messages: list[Message] = list(self._first)
        #: For undo: number of tokens and messages before each turn.
        self._turns: list[tuple[int, int]] = []
        if tokenizer.has_chat_template:
            # Raises at once if something is missing.
            self.tokenizer.chat([*self._first, _message("user", "?")])

    @property
    def held(self) -> list[int]:
        """The tokens of the conversation."""
        rows = self.generator.tokens
        return rows[0] if rows else []

    def say(self, text: str, write: Write) -> bool:
        """One turn: feeds ``text`` and writes the answer piece by piece; returns whether it was completed.

        Ctrl-C ends the answer early. What was written stays in the conversation; if nothing was, the turn is undone.
        Raises ValueError if the turn does not fit, or the template refuses it; the conversation is unchanged.
        """
        new = self._laid_out(text)
        if not new:
            return True
        before = len(self.held)
        answer: list[int] = []
        try:
            whole = self._answer(new, answer, write)
        except BaseException:
            self._keep(before)
            raise
        self._keep(before + len(new) + len(answer))
        if answer:
            self._turns.append((before, len(self.messages)))
            self.messages += [_message("user", text), _message("assistant", self._spoken(answer))]
            self._drop_end(answer)
        elif len(self.held) > before:
            self._keep(before)
        return whole

    def _answer(self, new: list[int], answer: list[int], write: Write) -> bool:
        """Writes the answer to ``new`` and puts its tokens into ``answer``; False after Ctrl-C."""
        steps = self.generator.generate_iter([new])
        writer = TextWriter(self.tokenizer.decode, write, new)
        try:
            for token in steps:
                answer.append(int(token))
                if answer[-1] not in self.generator.eos_ids:
                    writer.put(answer[-1])
        except KeyboardInterrupt:
            return False
        finally:
            close = getattr(steps, "close", None)
            if close is not None:
                close()
            writer.close()
        return True

    def _spoken(self, answer: Sequence[int]) -> str:
        return self.tokenizer.decode([t for t in answer if t not in self.generator.eos_ids])

    def _drop_end(self, answer: Sequence[int]) -> None:
        """Without a template, removes the end-of-sequence token, so that text continues after the answer."""
        if not self.tokenizer.has_chat_template and answer[-1] in self.generator.eos_ids:
            self._keep(len(self.held) - 1)

    def _keep(self, count: int) -> None:
        surplus = len(self.held) - count
        if surplus > 0 and count > 0:
            self.generator.rollback(surplus)
        elif surplus > 0:
            self.generator.reset()

    def _laid_out(self, text: str) -> list[int]:
        """Truncates the held tokens to their common prefix with the formatted conversation; returns the rest of it."""
        held = self.held
        if not self.tokenizer.has_chat_template:
            return self.tokenizer.encode(text, special=not held)
        whole = self.tokenizer.chat([*self.messages, _message("user", text)])
        self._check_room(whole)
        same = _shared(held, whole[:-1])  # at least one token is fed
        self._keep(same)
        return whole[same:]

    def _check_room(self, whole: list[int]) -> None:
        """Raises if the conversation does not fit; called before anything is truncated."""
        most = self.generator.config.max_seq_len
        if len(whole) > most:
            raise ValueError(
                f"the conversation would have {len(whole)} tokens, more than max_seq_len={most}; "
                "/undo or /reset makes room"
            )

    def undo(self) -> bool:
        """Undoes the last turn; returns whether there was one."""
        if not self._turns:
            return False
        tokens, messages = self._turns.pop()
        self._keep(tokens)
        del self.messages[messages:]
        return True

    def reset(self) -> None:
        """Removes all turns."""
        self.generator.reset()
        self.messages, self._turns = list(self._first), []

    def save(self, path: str) -> None:
        """Writes tokens, cache and messages to a file; arguments and errors as `Generator.save`."""
        said = {"first": self._first, "messages": self.messages, "turns": self._turns}
        self.generator.save(path, notes={NOTES: said})

    def load(self, path: str) -> None:
        """Replaces the conversation by the one in a file.

        Raises SessionError or OSError as `Generator.resume`, also for a file with several rows and, with a chat
        template, for one not saved by a chat. The conversation is then unchanged.
        """
        saved = read_session(path)
        said = self._said(saved)
        self.generator.resume(saved)
        self._first, self.messages = said["first"], said["messages"]
        self._turns = [(tokens, messages) for tokens, messages in said["turns"]]

    def _said(self, saved: SavedSession) -> dict[str, Any]:
        """The messages and turns in a file; raises if they are invalid."""
        rows = len(saved.about.target.counts)
        if rows > 1:
            raise SessionError(
                f"{saved.path} has {rows} conversations side by side; a chat has one"
            )
        nothing: dict[str, Any] = {"first": [], "messages": [], "turns": []}
        if NOTES not in saved.about.notes and not self.tokenizer.has_chat_template:
            return nothing
        try:
            return {
                name: TypeAdapter(kind).validate_python(saved.about.notes[NOTES][name], strict=True)
                for name, kind in (("first", list[Message]), ("messages", list[Message]), ("turns", list[list[int]]))
            }  # fmt: skip
        except (ValidationError, KeyError, TypeError):
            raise SessionError(
                f"{saved.path} was not saved in a chat: it does not have the messages, which the chat template lays out"
            ) from None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _shared(held: Sequence[int], wanted: Sequence[int]) -> int:
    count = 0
    for ours, theirs in zip(held, wanted, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


#: Key of a chat's messages in a session file.
NOTES = "chat"
HELP = (
    "/reset starts over, /undo takes back the last turn, /stats shows figures, /session save FILE and "
    "/session load FILE save and load the conversation, /quit ends; Ctrl-C stops an answer"
)


def run_chat(setup: Setup, system: str, stats: bool) -> None:
    """Reads lines and answers until /quit, the end of the input, or Ctrl-C twice at the prompt.

    Raises ValueError, FileNotFoundError or ModuleNotFoundError if the model or the settings cannot be used.
    """
    generator, tokenizer = open_generator(setup)
    chat = Chat(generator, tokenizer, system)
    how = (
        "chat template"
        if tokenizer.has_chat_template
        else "no chat template: it continues your text"
    )
    _note(f"{setup.model}, cache {generator.config.cache_name} ({how})\n{HELP}")
    interrupted = False
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # enables line editing in input()
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            if interrupted:
                return
            interrupted = True
            _note("Ctrl-C again, Ctrl-D or /quit ends")
            continue
        interrupted = False
        try:
            if not _turn(line, chat, stats):
                return
        except KeyboardInterrupt:  # between turns
            typer.echo()


def _turn(line: str, chat: Chat, stats: bool) -> bool:
    """Handles one line, a command or a message; False to quit."""
    if line.startswith("/"):
        return _command(line.strip(), chat)
    if not line:
        return True
    try:
        whole = chat.say(line, _write)
    except (ValueError, RuntimeError) as error:  # the conversation is unchanged
        show_error(error)
        return True
    typer.echo("" if whole else " …")
    if stats and chat.generator.metrics is not None:
        _note(summary(chat.generator))
    return True


def _command(line: str, chat: Chat) -> bool:
    """Runs a slash command; False to quit."""
    if line in ("/quit", "/exit"):
        return False
    if line == "/reset":
        chat.reset()
        said = "a new conversation"
    elif line == "/undo":
        said = "the last turn is taken back" if chat.undo() else "there is no turn to take back"
    elif line == "/stats":
        said = _figures(chat)
    elif line.split(maxsplit=1)[0] == "/session":
        said = _session(line, chat)
    else:
        said = HELP if line == "/help" else f"{line} is no command; {HELP}"
    if said:
        _note(said)
    return True


def _session(line: str, chat: Chat) -> str:
    """Saves or loads and returns a message; errors are shown and change nothing."""
    _, *words = line.split(maxsplit=2)
    if len(words) != 2 or words[0] not in ("save", "load"):
        return "/session needs save or load and a file: /session save FILE"
    do, path = words
    try:
        (chat.save if do == "save" else chat.load)(path)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        show_error(error)
        return ""
    return f"{len(chat.held)} tokens {'saved to' if do == 'save' else 'loaded from'} {path}"


def _figures(chat: Chat) -> str:
    if chat.generator.metrics is None:
        return "nothing was generated yet"
    held, most = len(chat.held), chat.generator.config.max_seq_len
    return f"the last answer: {summary(chat.generator)}; {held} of {most} tokens held"


def _note(text: str) -> None:
    typer.secho(text, fg="bright_black", err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
