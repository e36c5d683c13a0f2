"""Conversations in the terminal: what is fed, what is remembered, and what Ctrl-C and /undo leave."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

import caramba_fast
from caramba_fast.cli.app import app
from caramba_fast.cli.chat import Chat
from caramba_fast.infer import Generator, SpeculativeConfig, SpeculativeGenerator
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.models import ModelConfig, Transformer, load_model

TEMPLATE = (
    "{% if messages[0].role == 'user' and messages[0].content == 'refuse' %}"
    "{{ raise_exception('no refusing') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<end>", "<|system|>", "<|user|>", "<|assistant|>"]
TEXT = ["def read(path):\n    return open(path).read()\n", "hello there, how are you?\n"] * 4


USER = {"role": "user", "content": ""}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_folder(folder: Path, template: str | None) -> Path:
    """A checkpoint with random weights, whose tokenizer has a chat template or not."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    about |= {} if template is None else {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(2)
    save_file(Transformer(config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), "eos_token_id": 0}))
    return folder


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chat") / "templated", TEMPLATE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("chat") / "plain", None)


def make_chat(folder: Path, *, draft: bool = False, system: str = "", **settings: Any) -> Chat:
    settings = (
        dict(max_new_tokens=6, temperature=0.0, cache_kind="fp32", max_seq_len=256) | settings
    )
    tokenizer = TextTokenizer.of(folder)
    model = load_model(folder)
    if draft:
        config = SpeculativeConfig(spec_k=5, **settings)
        generator: Generator = SpeculativeGenerator(model, model, config, tokenizer=tokenizer)
    else:
        generator = Generator(model, tokenizer=tokenizer, **settings)
    return Chat(generator, tokenizer, system)


def say(chat: Chat, text: str) -> str:
    parts: list[str] = []
    assert chat.say(text, parts.append)
    return "".join(parts)


def interrupt_pass(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes in the ``number``-th pass of a model from now on; later ones are left alone."""
    forward, passes = Transformer.forward, iter(range(1, 10_000))

    def interrupted(self: Transformer, *arguments: Any, **options: Any) -> Any:
        if next(passes) == number:
            raise KeyboardInterrupt
        return forward(self, *arguments, **options)

    monkeypatch.setattr(Transformer, "forward", interrupted)


def layout(chat: Chat) -> list[int]:
    return chat.tokenizer.chat(chat.messages, add_generation_prompt=False)


def resumed(chat: Chat, folder: Path, **settings: Any) -> Chat:
    """Another conversation with the same messages and nothing cached."""
    other = make_chat(folder, **settings)
    other.messages = [dict(message) for message in chat.messages]
    return other


def fed_by(chat: Chat) -> list[list[int]]:
    """Filled with the tokens of every call from now on."""
    fed: list[list[int]] = []
    inner = chat.generator.generate_iter

    def generate_iter(ids: Any, *args: Any, **options: Any) -> Any:
        fed.append(list(ids[0]))
        return inner(ids, *args, **options)

    chat.generator.generate_iter = generate_iter  # type: ignore[method-assign]
    return fed


# -- what is fed and held --------------------------------------------------------------------


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_turns_are_laid_out_by_the_template(templated: Path, system: str, draft: bool) -> None:
    chat = make_chat(templated, system=system, draft=draft)
    for text in ("hello", "  how are you?  ", "naïve 🦜"):
        asked = [*chat.messages, {"role": "user", "content": text}]
        wanted = chat.tokenizer.chat(asked)
        known = chat.tokenizer.chat(chat.messages[:-1]) if len(chat.messages) > 1 else []
        fed = fed_by(chat)
        answer = say(chat, text)
        assert chat.held[: len(wanted)] == wanted
        assert chat.messages == [*asked, {"role": "assistant", "content": answer}]
        assert len(fed[0]) <= len(wanted) - len(known), (
            "nothing before the last answer is fed again"
        )
    assert chat.messages[0]["role"] == ("system" if system else "user")


@pytest.mark.parametrize("draft", [False, True])
def test_an_answer_is_what_a_fresh_conversation_would_give(templated: Path, draft: bool) -> None:
    chat = make_chat(templated, draft=draft)
    for text in ("hello", "and you?", "why"):
        fresh = resumed(chat, templated)
        assert say(chat, text) == say(fresh, text)


def test_the_models_end_of_turn_is_the_templates(templated: Path) -> None:
    """An answer that is only <end>: held as the template lays it out, and not fed again."""
    chat = make_chat(templated, logit_bias={0: 1e4})
    assert say(chat, "hello") == ""
    assert chat.messages[-1] == {"role": "assistant", "content": ""}
    held = chat.held
    assert held[-1] == 0 and held == layout(chat)[: len(held)]
    fed = fed_by(chat)
    say(chat, "again")
    assert chat.held[: len(held)] == held and fed[0][0] not in (0, 3)


def test_an_answer_that_was_cut_short_gets_the_templates_end(templated: Path) -> None:
    chat = make_chat(templated)
    say(chat, "hello")
    assert 0 not in chat.held[-6:]
    say(chat, "again")
    assert chat.held[: len(layout(chat)) - 8].count(0) >= 2


def test_without_a_template_the_text_goes_on(plain: Path) -> None:
    chat = make_chat(plain)
    encode = chat.tokenizer.encode
    first = say(chat, "def read(")
    assert chat.tokenizer.decode(chat.held) == "def read(" + first
    fed = fed_by(chat)
    say(chat, "path):")
    assert fed == [encode("path):", special=False)]
    assert len(chat.held) == len(encode("def read(")) + len(fed[0]) + 12


def test_without_a_template_an_end_of_sequence_token_is_taken_out(plain: Path) -> None:
    chat = make_chat(plain, logit_bias={0: 1e4})
    say(chat, "def read(")
    assert 0 not in chat.held
    say(chat, "path")
    assert 0 not in chat.held and chat.tokenizer.decode(chat.held) == "def read(path"


def test_a_system_message_needs_a_template(plain: Path) -> None:
    with pytest.raises(ValueError, match="--system needs a model with a chat template"):
        make_chat(plain, system="Be brief.")


# -- going back ------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["fp32", "q8", "q4"])
@pytest.mark.parametrize("draft", [False, True])
def test_undo_leaves_no_trace(templated: Path, cache: str, draft: bool) -> None:
    chat, other = (make_chat(templated, cache_kind=cache, draft=draft) for _ in range(2))
    for each in (chat, other):
        say(each, "hello")
    messages, held = list(chat.messages), chat.held
    say(chat, "something else entirely")
    assert chat.undo()
    assert chat.messages == messages and chat.held == held[: len(chat.held)]
    if cache == "fp32":
        assert say(chat, "and you?") == say(other, "and you?")
    while chat.undo():
        pass
    assert chat.messages == [] and chat.held == [] and not chat.undo()
    say(chat, "a new start")


def test_undo_without_a_template(plain: Path) -> None:
    chat = make_chat(plain)
    say(chat, "def")
    held = chat.held
    answer = say(chat, " read(")
    assert chat.undo() and chat.held == held
    assert say(chat, " read(") == answer
    chat.reset()
    assert chat.held == [] and not chat.undo()


def test_reset_keeps_the_system_message(templated: Path) -> None:
    chat = make_chat(templated, system="Be brief.")
    first = say(chat, "hello")
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "Be brief."}] and chat.held == []
    assert say(chat, "hello") == first


# -- Ctrl-C ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [3, 4, 5, 6])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("kind", ["templated", "plain"])
def test_ctrl_c_keeps_what_was_said(
    kind: str, draft: bool, number: int, request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = request.getfixturevalue(kind)
    chat = make_chat(folder, draft=draft, max_new_tokens=20)
    say(chat, "hello")
    messages = list(chat.messages)
    fed, parts = fed_by(chat), list[str]()
    before = len(chat.held)
    interrupt_pass(number, monkeypatch)
    assert not chat.say("go on", parts.append)
    said = "".join(parts)
    assert said and [m["content"] for m in chat.messages[len(messages) :]] == ["go on", said]
    if kind == "plain":
        assert chat.tokenizer.decode(chat.held[before + len(fed[0]) :]) == said
    fresh = resumed(chat, folder, max_new_tokens=20)
    answer = say(chat, "and?")
    assert kind == "plain" or answer == say(fresh, "and?")
    assert chat.undo() and chat.undo() and chat.messages == messages


def test_ctrl_c_between_tokens_leaves_none_that_were_not_shown(plain: Path) -> None:
    """A speculative round gives several tokens; those not written yet are taken back."""
    chat = make_chat(plain, draft=True, max_new_tokens=20)
    taken: list[int] = []
    inner = chat.generator.generate_iter

    def generate_iter(ids: Any) -> Iterator[int]:
        for token in inner(ids):
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(int(token))
            yield taken[-1]

    chat.generator.generate_iter = generate_iter  # type: ignore[method-assign,assignment]
    assert not chat.say("hello", lambda _: None)
    assert chat.held == [*chat.tokenizer.encode("hello"), *taken]


def test_an_answer_that_fails_takes_its_turn_back(plain: Path) -> None:
    """Such as for a lack of memory, or a terminal that cannot show it: what follows is not behind half an answer."""
    chat = make_chat(plain, max_new_tokens=8)
    say(chat, "hello")
    held, messages = list(chat.held), [*chat.messages]

    def write(text: str) -> None:
        raise UnicodeEncodeError("latin-1", text, 0, 1, "no such character")

    with pytest.raises(UnicodeEncodeError):
        chat.say(" and on", write)
    assert chat.held == held and chat.messages == messages
    assert chat.undo() and not chat.held


@pytest.mark.parametrize("kind", ["templated", "plain"])
@pytest.mark.parametrize("turn", [0, 1])
def test_ctrl_c_before_the_first_token_takes_the_turn_back(
    kind: str, turn: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(kind)
    chat, other = make_chat(folder), make_chat(folder)
    for each in (chat, other)[: 2 * turn]:
        say(each, "hello")
    messages, parts = list(chat.messages), list[str]()
    interrupt_pass(1, monkeypatch)
    assert not chat.say("a long prompt", parts.append)
    assert parts == [] and chat.messages == messages
    assert say(chat, "and you?") == say(other, "and you?")


# -- turns that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["templated", "plain"])
def test_a_turn_that_does_not_fit_changes_nothing(
    kind: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(kind)
    chat, other = (make_chat(folder, max_seq_len=64) for _ in range(2))
    for each in (chat, other):
        say(each, "hello")
    messages = list(chat.messages)
    held = len(chat.tokenizer.chat([*messages, USER])) if kind == "templated" else len(chat.held)
    for text in ("x" * 200, "z" * (64 - held - 2)):  # the second only with its answer
        with pytest.raises(ValueError, match="max_seq_len=64"):
            chat.say(text, print)
    assert chat.messages == messages
    assert say(chat, "and") == say(other, "and")


def test_a_template_that_refuses_is_an_error(templated: Path) -> None:
    chat = make_chat(templated)
    with pytest.raises(ValueError, match="chat template refuses the messages: no refusing"):
        chat.say("refuse", print)
    assert chat.messages == []
    say(chat, "hello")


# -- the command -----------------------------------------------------------------------------

OPTIONS = ("--max-new-tokens", "4", "--temperature", "0")


def command(folder: Path, lines: str, *options: str) -> Any:
    words = ["chat", "--model", str(folder), *OPTIONS, *options]
    return CliRunner().invoke(app, words, input=lines)


def test_a_session(templated: Path) -> None:
    lines = "/stats\n/undo\nhello\n\n/stats\n/undo\n/undo\n/what\n/help\nhello\n/reset\nhello\n/quit\nnever read\n"
    result = command(templated, lines, "--stats")
    assert result.exit_code == 0, result.output
    third = result.stdout[: len(result.stdout) // 3]
    assert third.strip() and result.stdout == 3 * third, "every first answer is the same"
    for said in (
        "cache q8 (chat template)", "nothing was generated yet", "there is no turn to take back",
        "the last turn is taken back", "/what is no command", "a new conversation",
        "of 4096 tokens held", "bytes/token (q8)",
    ):  # fmt: skip
        assert said in result.stderr
    assert "never read" not in result.output


def test_the_end_of_the_input_ends_it(plain: Path) -> None:
    result = command(plain, "def read(\n")
    assert result.exit_code == 0, result.output
    assert "no chat template" in result.stderr and len(result.stdout.splitlines()) >= 2


def test_a_turn_that_does_not_fit_is_one_line_and_the_next_is_answered(templated: Path) -> None:
    result = command(templated, f"{'x' * 300}\nrefuse\nhello\n", "--max-seq-len", "64")
    assert result.exit_code == 0, result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("caramba-fast: ")]
    assert len(errors) == 2
    assert "max_seq_len=64" in errors[0] and "no refusing" in errors[1]
    assert result.stdout.strip()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--system", "Be brief."), "--system needs a model with a chat template"),
        (("--cache", "q3"), "q3"),
        (("--spec-k", "2"), "--spec-k is 2"),
    ],
)
def test_wrong_options_are_one_line(plain: Path, options: tuple[str, ...], said: str) -> None:
    result = command(plain, "hello\n", *options)
    assert result.exit_code == 1 and result.stdout == ""
    assert len(result.stderr.splitlines()) == 1 and said in result.stderr


# -- a real terminal -------------------------------------------------------------------------


#: Only a controlling terminal turns Ctrl-C into an interrupt, and who was started in the background ignores it.
TAKE_TERMINAL = (
    "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from caramba_fast.cli import main; main()"
)


class Terminal:
    """``caramba-fast chat`` behind a pseudo-terminal."""

    def __init__(self, *options: str) -> None:
        import pty

        self.end, other = pty.openpty()
        root = str(Path(caramba_fast.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, "chat", *options],
            stdin=other, stdout=other, stderr=other, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "TERM": "dumb", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, text: str, seconds: float = 60.0) -> str:
        """What came up to and with ``text``."""
        until = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.end], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"{text!r} did not come; seen: {self.seen!r}"
            self.seen += os.read(self.end, 4096).decode(errors="replace")
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are Unix's")
def test_ctrl_c_in_a_terminal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "endless", None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    options = ("--model", str(folder), "--max-new-tokens", "100000", "--max-seq-len", "200000")
    terminal = Terminal(*options, "--cache", "q4")
    try:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("hello")
        time.sleep(1.0)
        terminal.type("\x03")
        terminal.until(" …")
        terminal.until("> ")
        terminal.type("/stats\n")
        held = terminal.until("tokens held")
        assert int(held.split("; ")[1].split(" of ")[0]) > 2
        terminal.until("> ")
        terminal.type("/undo\n")
        terminal.until("taken back")
        terminal.until("> ")
        time.sleep(0.5)  # readline sees an interrupt once it waits for keys
        terminal.type("\x03")
        terminal.until("ends")
        terminal.until("> ")
        terminal.type("\x04")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.end)


# -- sessions on disk ------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("kind", ["templated", "plain"])
def test_a_chat_goes_on_from_a_file(
    kind: str, draft: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, file = request.getfixturevalue(kind), str(tmp_path / "a chat")
    system = "Be brief." if kind == "templated" else ""
    chat = make_chat(folder, system=system, draft=draft, cache_kind="q4")
    for text in ("hello", "and you?"):
        say(chat, text)
    chat.save(file)
    other = make_chat(folder, draft=draft, cache_kind="q4")
    say(other, "something else")
    other.load(file)
    assert (other.held, other.messages) == (chat.held, chat.messages)
    fed = fed_by(other), fed_by(chat)
    assert say(other, "why") == say(chat, "why") and fed[0] == fed[1]
    for _ in range(3):
        assert other.undo() and chat.undo()
        assert (other.held, other.messages) == (chat.held, chat.messages)
    assert not other.undo()
    other.reset()
    assert [m["content"] for m in other.messages] == ([system] if system else [])


def test_files_of_others_are_refused_and_change_nothing(
    templated: Path, plain: Path, tmp_path: Path
) -> None:
    chat, file = make_chat(templated), str(tmp_path / "session")
    say(chat, "hello")
    held, messages = chat.held, list(chat.messages)
    other = make_chat(templated)
    other.generator.generate([[5, 6], [7, 8]])
    other.generator.save(file)
    with pytest.raises(ValueError, match="2 conversations side by side; a chat has one"):
        chat.load(file)
    for notes in ({}, {"chat": {"first": [], "messages": [{"role": 3}], "turns": []}}):
        other.generator.reset()
        other.generator.generate([[5, 6]])
        other.generator.save(file, notes=notes)
        with pytest.raises(ValueError, match="was not saved in a chat"):
            chat.load(file)
    continued = make_chat(plain)
    continued.generator.generate([[5, 6]])
    continued.generator.save(file)
    with pytest.raises(ValueError, match="was not saved in a chat"):
        chat.load(file)
    assert (chat.held, chat.messages) == (held, messages)
    fresh = make_chat(plain)
    fresh.load(file)
    assert fresh.held == continued.held


def test_a_session_of_a_chat_on_the_command_line(templated: Path, tmp_path: Path) -> None:
    file = tmp_path / "a file"
    lines = (
        f"hello\n/session save {file}\nmore\n/session load {file}\nmore\n/session load {tmp_path / 'no'}\n"
        "/session save\n/session\n/undo\n/undo\n/undo\n/quit\n"
    )
    result = command(templated, lines)
    assert result.exit_code == 0, result.output
    first, both = (
        command(templated, text).stdout for text in ("hello\n/quit\n", "hello\nmore\n/quit\n")
    )
    more = both.removeprefix(first)
    assert result.stdout == first + 2 * more, "the same answer after going back"
    for said in (
        f"tokens saved to {file}", f"tokens loaded from {file}", f"{tmp_path / 'no'}: No such file",
        "/session needs save or load and a file", "there is no turn to take back",
    ):  # fmt: skip
        assert said in result.stderr, said
    again = command(templated, f"/session load {file}\nmore\n/quit\n")
    assert again.stdout == more
    wrong = command(templated, f"/session load {file}\nhello\n/quit\n", "--cache", "nf4")
    assert "cache is 'nf4', the session has 'q8'" in wrong.stderr
    fresh = command(templated, "hello\n/quit\n", "--cache", "nf4")
    assert wrong.exit_code == 0 and wrong.stdout == fresh.stdout


def generated(folder: Path, prompt: str, *options: str) -> Any:
    return CliRunner().invoke(app, ["generate", prompt, "--model", str(folder), *OPTIONS, *options])


@pytest.mark.parametrize("options", [(), ("--cache", "q4", "--draft", "lookup")])
def test_generate_keeps_a_session(plain: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    file = tmp_path / "session"
    first = generated(plain, "def read(", "--session", str(file), *options)
    assert first.exit_code == 0, first.output
    whole = file.read_bytes()
    second = generated(plain, "path):", "--session", str(file), *options)
    assert second.exit_code == 0 and second.stdout.startswith("path):"), second.output
    generator = make_chat(plain, cache_kind=options[1] if options else "fp16").generator
    generator.resume(file)
    text = generator.tokenizer.decode(generator.tokens[0])
    assert text == first.stdout[:-1] + second.stdout[:-1]
    file.write_bytes(whole)
    again = generated(plain, "path):", "--session", str(file), *options)
    assert again.stdout == second.stdout
    file.write_bytes(whole)
    left_open = generated(plain, "path):", "--session", str(file))  # the cache is the file's
    assert left_open.stdout == second.stdout, left_open.output
    other = generated(plain, "path):", "--session", str(file), "--cache", "nf4")
    assert other.exit_code == 1 and "cache is 'nf4', the session has" in other.stderr


def test_generate_makes_room_for_what_a_session_has(plain: Path, tmp_path: Path) -> None:
    file, words = str(tmp_path / "session"), "def read(path):\n" * 700
    first = generated(plain, words, "--session", file, "--max-seq-len", "8192")
    assert first.exit_code == 0, first.stderr
    second = generated(plain, "path", "--session", file)  # 2048 would be too few
    assert second.exit_code == 0, second.stderr
    few = generated(plain, "path", "--session", file, "--max-seq-len", "2048")
    assert few.exit_code == 1 and "2048" in few.stderr


def test_generate_refuses_before_it_loads_a_model(plain: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    for options, said in (
        (("--session", str(other)), "is no session of caramba-fast"),
        (("--session", str(tmp_path / "no" / "session")), "--session needs a folder that does"),
        (("--session", str(tmp_path)), "is a folder; the name of a file is needed"),
        (
            ("--session", str(tmp_path / "s"), "--num-return-sequences", "2"),
            "with --session 1 is allowed",
        ),
    ):
        result = generated(tmp_path / "no model", "x", *options)
        assert result.exit_code == 1 and said in result.stderr, result.output
    assert other.read_text() == "mine" and [f.name for f in tmp_path.iterdir()] == ["other"]
