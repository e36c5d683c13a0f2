"""Text and tokens: one face for the tokenizers there are, and text written as tokens arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from caramba_fast.config.files import read_json
from caramba_fast.models.demos import load_tokenizer
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.registry import load_hub_tokenizer

Messages = Sequence[Mapping[str, Any]]


class TokenizerError(RuntimeError):
    """A tokenizer failed with something that is no `Exception`, as native ones do when they panic."""


class TextWriter:
    """Writes text as tokens arrive.

    A token is decoded together with those before it, since decoders drop the space before a first word,
    and bytes that are not a whole character yet are held back.

    Args:
        decode: tokens to text.
        write: takes each new piece of text.
        context: tokens before the first one put, already written.
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
    def state(self) -> tuple[list[int], list[int]]:
        """What it goes on from; may be put back."""
        return list(self._written), list(self._waiting)

    @state.setter
    def state(self, state: tuple[list[int], list[int]]) -> None:
        self._written, self._waiting = list(state[0]), list(state[1])

    def put(self, token: int) -> None:
        """Takes one token."""
        while len(self._written) < len(self._context):  # it may begin within a character
            if not self._decode(self._written).startswith("\ufffd"):
                break
            self._written = self._context[-len(self._written) - 1 :]
        self._context = []
        self._waiting.append(token)
        if not self._new_text().endswith("\ufffd"):
            self.close()

    def _new_text(self) -> str:
        return self._decode(self._written + self._waiting)[len(self._decode(self._written)) :]

    def close(self) -> None:
        """Writes what is left, whole character or not."""
        if self._waiting:
            text = self._new_text()
            # A token without text leaves those before it to what follows.
            kept = self._waiting if text else [*self._written, *self._waiting][-32:]
            self._written, self._waiting = kept, []
            self._write(text)


class TextTokenizer:
    """Encodes, decodes, streams, and lays out chats.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a tokenizer of transformers.
        folder: where it came from; a chat template is looked for there.

    Raises:
        TypeError: ``tokenizer`` has no encode and decode.
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
        self._templated: Any = (
            None  # the folder's tokenizer as transformers has it, once it was needed
        )

    @classmethod
    def of(cls, tokenizer: Any) -> TextTokenizer:
        """From a folder, a ``tokenizer.json`` or a GGUF file, or around a tokenizer object.

        Raises:
            FileNotFoundError, CheckpointError, TypeError: nothing there, damaged, or no tokenizer.
            ModuleNotFoundError: what reads it is not installed.
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
        """Token ids of ``text``, with those the tokenizer adds (such as BOS) unless ``special`` is False."""
        found = _called(self.tokenizer.encode, text, add_special_tokens=special)
        return list(getattr(found, "ids", found))

    def decode(self, ids: Sequence[int] | Tensor, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        text: str = _called(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, tokens: Iterable[int], context: Sequence[int] = ()) -> Iterator[str]:
        """Pieces of text as tokens arrive, never half a character; ``context`` is what precedes them."""
        pieces: list[str] = []
        writer = TextWriter(self.decode, pieces.append, context)
        for token in tokens:
            writer.put(int(token))
            yield from filter(None, pieces)
            pieces.clear()
        writer.close()
        yield from filter(None, pieces)

    # -- chats --------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can lay out messages."""
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
        """Token ids of a conversation, laid out as the model was trained.

        Args:
            messages: ``{"role": "user", "content": "…"}`` each.
            add_generation_prompt: end where the model is to answer.
            tools: JSON schemas of functions, given to the template as they are.

        Raises:
            ValueError: the tokenizer has no chat template, or the template refuses the messages.
            ImportError: transformers or jinja2, which fill templates in, is not installed.
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
            if type(error).__module__.partition(".")[0] != "jinja2":
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
    """What a tokenizer answers.

    Raises:
        TokenizerError: it panicked. Panics of Rust (pyo3's PanicException) are no `Exception`, and would be taken for
            an interrupt.
    """
    try:
        return method(*args, **options)
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"the tokenizer failed: {type(error).__name__}: {error}") from error


def find_tokenizer(folder: Path, tokenizer: Any = None) -> TextTokenizer | None:
    """The tokenizer asked for, else the folder's own, else None.

    Raises:
        FileNotFoundError, CheckpointError, TypeError, ModuleNotFoundError: as `TextTokenizer.of`.
    """
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
