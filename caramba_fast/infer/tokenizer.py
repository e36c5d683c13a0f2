"""TextTokenizer: one interface for all tokenizers, with chat templates and streaming detokenization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from torch import Tensor

from caramba_fast.config.files import read_json
from caramba_fast.models.demos import load_tokenizer
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.registry import load_hub_tokenizer

Messages = Sequence[Mapping[str, Any]]


class TokenizerError(RuntimeError):
    """A tokenizer panicked: it raised something that is not an `Exception`, as native code may."""


def text_after(
    decode: Callable[[list[int]], str], before: Sequence[int], ids: Sequence[int]
) -> str:
    """Text of ``ids`` after ``before``; decoded alone, the first token may lose its leading space.

    A character that begins in ``before`` belongs to the ids that complete it.
    """
    head, whole = decode(list(before)), decode([*before, *ids])
    same = len(commonprefix([head, whole]))  # noqa: RUF071 - of characters, as is meant here
    return whole[same:] if head[same:].strip("\ufffd") == "" else decode(list(ids))


class TextWriter:
    """Detokenizes a stream of tokens.

    Tokens are decoded together with those before them, since decoders drop the space before a first word. Bytes of an
    incomplete character are held back.

    Args:
        decode: token ids to text.
        write: called with each new piece of text.
        context: the tokens before the first one, already written.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        write: Callable[[str], object],
        context: Sequence[int] = (),
    ) -> None:
        self._decode, self._write = decode, write
        self._context = list(context)
        self._written, self._waiting = self._context[-8:], list[int]()

    @property
    def state(self) -> tuple[list[int], list[int], list[int]]:
        """The state between two tokens; can be set."""
        return list(self._context), list(self._written), list(self._waiting)

    @state.setter
    def state(self, state: tuple[list[int], list[int], list[int]]) -> None:
        self._context, self._written, self._waiting = map(list, state)

    def put(self, token: int) -> None:
        """Adds one token."""
        while len(self._written) < len(self._context):  # the window may begin inside a character
            if not self._decode(self._written).startswith("\ufffd"):
                break
            self._written = self._context[-len(self._written) - 1 :]
        self._context = []
        self._waiting.append(token)
        if not self._new_text().endswith("\ufffd"):
            self.close()

    def _new_text(self) -> str:
        return text_after(self._decode, self._written, self._waiting)

    def close(self) -> None:
        """Writes the remaining text, even an incomplete character."""
        if self._waiting:
            text = self._new_text()
            # Tokens without text stay in the window, as context of the next ones.
            kept = self._waiting if text else [*self._written, *self._waiting][-32:]
            self._written, self._waiting = kept, []
            self._write(text)


class TextTokenizer:
    """Encodes, decodes and streams text, and applies chat templates.

    Args:
        tokenizer: a `tokenizers.Tokenizer` or a transformers tokenizer.
        folder: where it was loaded from; searched for a chat template.

    Raises:
        TypeError: ``tokenizer`` has no encode or decode.
    """

    def __init__(self, tokenizer: Any, folder: Path | None = None) -> None:
        if not callable(getattr(tokenizer, "encode", None)) or not callable(
            getattr(tokenizer, "decode", None)
        ):
            raise TypeError(
                f"tokenizer is a {type(tokenizer).__name__}; a path, a tokenizers.Tokenizer or a "
                "transformers tokenizer is needed"
            )
        self.tokenizer, self.folder = tokenizer, folder
        self._templated: Any = None  # the folder's transformers tokenizer, once it was needed

    @classmethod
    def of(cls, tokenizer: Any) -> TextTokenizer:
        """Loads a folder, a ``tokenizer.json`` or a GGUF file, or wraps a tokenizer object.

        Raises:
            FileNotFoundError, CheckpointError, TypeError: nothing there, damaged, or not a tokenizer.
            ModuleNotFoundError: the library that reads it is not installed.
        """
        if isinstance(tokenizer, TextTokenizer):
            return tokenizer
        if not isinstance(tokenizer, (str, Path)):
            return cls(tokenizer)
        path = Path(tokenizer)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; a tokenizer folder is needed")
        if path.suffix == GGUF:
            return cls(load_hub_tokenizer(path))
        folder = path.parent if path.name == "tokenizer.json" else path
        if not folder.is_dir():
            raise FileNotFoundError(f"{path} is no folder and no tokenizer.json")
        fast = (folder / "tokenizer.json").is_file()
        return cls(load_tokenizer(folder) if fast else load_hub_tokenizer(folder), folder)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``, with those the tokenizer adds (such as BOS) unless ``special`` is False.

        Raises:
            ValueError: the text holds half a surrogate pair, as bytes that are no UTF-8 become one.
        """
        try:
            str.encode(text)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is no Unicode that can be encoded: character {error.start} is {text[error.start]!r}, a byte "
                "that is no UTF-8 or half a surrogate pair"
            ) from None
        found = _called(self.tokenizer.encode, text, add_special_tokens=special)
        return list(getattr(found, "ids", found))

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        text: str = _called(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, tokens: Iterable[int], context: Sequence[int] = ()) -> Iterator[str]:
        """Yields text in whole characters as tokens arrive; ``context`` holds the tokens before them."""
        pieces: list[str] = []
        writer = TextWriter(self.decode, pieces.append, context)
        for token in tokens:
            writer.put(int(token))
            yield from filter(None, pieces)
            pieces.clear()
        writer.close()
        yield from filter(None, pieces)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return bool(getattr(self.tokenizer, "chat_template", None)) or self._folder_has_template

    @property
    def _folder_has_template(self) -> bool:
        if self.folder is None:
            return False
        if (self.folder / "chat_template.jinja").is_file():
            return True
        file = self.folder / "tokenizer_config.json"
        try:
            return bool(read_json(file).get("chat_template"))
        except (OSError, ValueError, AttributeError):
            return False

    def chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, formatted with the chat template.

        Args:
            messages: mappings such as ``{"role": "user", "content": "…"}``.
            add_generation_prompt: append the start of the assistant's turn.
            tools: JSON schemas of functions, passed to the template.

        Raises:
            ValueError: there is no chat template, or it rejects the messages.
            ImportError: transformers or jinja2 is not installed.
        """
        tokenizer = self._with_template()
        try:
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **({"tools": list(tools)} if tools else {}),
            )
        except Exception as error:
            refuses = type(error).__module__.partition(".")[0] == "jinja2"
            if not refuses and not isinstance(error, RecursionError):
                raise
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, special=False)  # the template writes special tokens itself

    def _with_template(self) -> Any:
        if not self.has_chat_template:
            where = "" if self.folder is None else f" in {self.folder}"
            raise ValueError(
                f"the tokenizer{where} has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); encode the text of the conversation instead"
            )
        if not hasattr(self.tokenizer, "apply_chat_template"):
            assert self.folder is not None
            if self._templated is not None:
                return self._templated
            try:
                self._templated = load_hub_tokenizer(self.folder)
            except ModuleNotFoundError as error:
                raise ModuleNotFoundError(
                    f"the chat template in {self.folder} needs transformers and jinja2 "
                    "(pip install transformers jinja2)"
                ) from error
            return self._templated
        return self.tokenizer


def _called(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a tokenizer; raises TokenizerError for a Rust panic, which is not an `Exception`."""
    try:
        return method(*args, **options)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed: {type(error).__name__}: {error}") from error


def find_tokenizer(folder: Path, tokenizer: Any = None) -> TextTokenizer | None:
    """``tokenizer`` if given, else that of the folder or GGUF file, else None; errors as `TextTokenizer.of`."""
    if tokenizer is not None:
        return TextTokenizer.of(tokenizer)
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
    )
    if folder.suffix == GGUF:
        return TextTokenizer.of(folder)
    return TextTokenizer.of(folder) if any((folder / name).is_file() for name in names) else None
