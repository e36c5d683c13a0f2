"""``caramba-fast chat``: a conversation in the terminal."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import typer

from caramba_fast.cli.conversation import Chat
from caramba_fast.cli.models import Setup, open_generator, summary
from caramba_fast.cli.options import show_error

HELP = (
    "/reset begins anew, /undo takes the last turn back, /stats shows figures, /quit ends; "
    "Ctrl-C stops an answer"
)
Read = Callable[[], str]


def run_chat(setup: Setup, system: str, stats: bool, read: Read | None = None) -> None:
    """Reads lines and answers until /quit or the end of the input; Ctrl-C twice at the prompt ends too.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: a model or settings that cannot be used.
    """
    generator, tokenizer = open_generator(setup)
    chat = Chat(generator, tokenizer, system)
    how = (
        "chat template"
        if tokenizer.has_chat_template
        else "no chat template: it continues your text"
    )
    _note(f"{setup.model}, cache {generator.config.cache_name} ({how})\n{HELP}")
    read, interrupted = read or _prompt, False
    if importlib.util.find_spec("readline") is not None:
        importlib.import_module("readline")  # input() edits lines with it
    while True:
        try:
            line = read()
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
        except KeyboardInterrupt:  # between two turns: nothing is under way
            typer.echo()


def _turn(line: str, chat: Chat, stats: bool) -> bool:
    """Obeys or answers one line; False to end."""
    if line.startswith("/"):
        return _command(line.strip(), chat)
    if not line:
        return True
    try:
        whole = chat.say(line, _write)
    except (ValueError, RuntimeError) as error:  # the conversation is as it was
        show_error(error)
        return True
    typer.echo("" if whole else " …")
    if stats and chat.generator.metrics is not None:
        _note(summary(chat.generator))
    return True


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
        said = _figures(chat)
    else:
        said = HELP if line == "/help" else f"{line} is no command; {HELP}"
    _note(said)
    return True


def _figures(chat: Chat) -> str:
    if chat.generator.metrics is None:
        return "nothing was generated yet"
    held, most = len(chat.held), chat.generator.config.max_seq_len
    return f"the last answer: {summary(chat.generator)}; {held} of {most} tokens held"


def _note(text: str) -> None:
    typer.secho(text, fg="bright_black", err=True)


def _prompt() -> str:
    return input("> " if sys.stdin.isatty() else "")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
