"""Generates text with a checkpoint and its tokenizer, on top of `caramba_fast.infer`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from caramba_fast.infer import GenerateConfig
from caramba_fast.infer import Generator as TokenGenerator
from caramba_fast.infer.output import GenerateOutput
from caramba_fast.infer.tokenizer import find_tokenizer
from caramba_fast.models import demo_path
from caramba_fast.models.registry import checkpoint_folder, load

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from caramba_fast.infer.options import TextOptions

RULE = "-" * 30
#: Settings that are arguments of each call.
OF_A_CALL = ("max_new_tokens", "temperature", "top_p")
#: Settings with which a prompt would not give exactly one text.
NO_TEXT = ("return_dict", "return_dict_in_generate", "num_return_sequences")


class Generator:
    """Generates text with the model and tokenizer of a checkpoint folder; calls are independent.

    Args:
        checkpoint_path: a Hugging Face checkpoint folder (config.json and safetensors), a GGUF file or a Hub id.
        tokenizer_path: a tokenizer folder, a ``tokenizer.json`` or a tokenizer object; None for the checkpoint's own.
        device, dtype: of the weights; dtype None for the checkpoint's own.
        log: called with a line of text at each step of loading.
        settings: fields of `GenerateConfig` for every call, such as ``cache="q8"`` or ``seed=0``, except `OF_A_CALL`
            and `NO_TEXT`.

    Raises:
        CheckpointError: the path is a pickle, missing or damaged; the message says what to do.
        ValueError: an invalid setting, or there is no tokenizer.
    """

    def __init__(
        self,
        checkpoint_path: str | Path,
        tokenizer_path: Any = None,
        device: torch.device | str = "cpu",
        *,
        dtype: torch.dtype | str | None = torch.float32,
        log: Callable[[str], object] = lambda _: None,
        **settings: Unpack[TextOptions],
    ) -> None:
        self.settings: dict[str, Any] = {**settings}
        given = [name for name in OF_A_CALL if name in self.settings]
        if given:
            raise ValueError(
                f"{given[0]} is given with each call: generate(prompt, {given[0]}={self.settings[given[0]]!r})"
            )
        _check_text(self.settings)
        GenerateConfig(**self.settings)  # raises early for invalid settings
        folder = checkpoint_folder(checkpoint_path)
        log(f"Loading Tokenizer from {folder if tokenizer_path is None else tokenizer_path}...")
        tokenizer = find_tokenizer(folder, tokenizer_path)
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer; give tokenizer_path")
        self.tokenizer = tokenizer
        log(f"Loading Checkpoint from {folder}...")
        self.model = load(folder, device, dtype)
        log("Generator Ready.")

    def generate(
        self,
        prompt: str,
        max_new_tokens: int = 50,
        temperature: float = 0.7,
        top_p: float | None = 0.9,
        **settings: Unpack[TextOptions],
    ) -> str:
        """The prompt and the generated text after it.

        Args:
            prompt: text of at least one token.
            max_new_tokens: most tokens to generate.
            temperature: 0 is greedy.
            top_p: nucleus sampling; 1 or None for all tokens.
            settings: further fields of `GenerateConfig` for this call.

        Raises:
            ValueError: an empty prompt, or a setting out of range.
        """
        return self.generate_batch([prompt], 1, max_new_tokens, temperature, top_p, **settings)[0]

    def generate_text(self, prompt: str, *args: Any, **settings: Unpack[TextOptions]) -> str:
        """Alias of `generate`."""
        return self.generate(prompt, *args, **settings)

    def generate_stream(
        self,
        prompt: str,
        max_new_tokens: int = 50,
        temperature: float = 0.7,
        top_p: float | None = 0.9,
        **settings: Unpack[TextOptions],
    ) -> Iterator[str]:
        """Yields the new text, without the prompt, in pieces as it is generated."""
        given = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
        ids = self._encode(prompt)
        generator = self._generator([ids], {**given, **settings})
        return self.tokenizer.stream(
            self._without_eos(generator, map(int, generator.generate_iter([ids]))), ids
        )

    def generate_batch(
        self,
        prompts: Sequence[str],
        batch_size: int = 3,
        max_new_tokens: int = 50,
        temperature: float = 0.7,
        top_p: float | None = 0.9,
        **settings: Unpack[TextOptions],
    ) -> list[str]:
        """`generate` for several prompts, ``batch_size`` of them at a time.

        Raises:
            TypeError: prompts is one string.
            ValueError: batch_size below 1, or as `generate`.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts is one string; a list of them is needed")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; 1 or more is allowed")
        given = dict(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
        rows = [self._encode(prompt) for prompt in prompts]
        texts = []
        for start in range(0, len(rows), batch_size):
            texts += self._texts(rows[start : start + batch_size], {**given, **settings})
        return texts

    def _texts(self, rows: list[list[int]], settings: dict[str, Any]) -> list[str]:
        generator = self._generator(rows, settings)
        out = generator.generate(rows, return_dict=True)
        assert isinstance(out, GenerateOutput)
        written = out.sequences[:, max(map(len, rows)) :].tolist()
        ended = [row[:count] for row, count in zip(written, out.new_tokens, strict=True)]
        new = [list(self._without_eos(generator, iter(row))) for row in ended]
        return [self.tokenizer.decode(a + b) for a, b in zip(rows, new, strict=True)]

    def _generator(self, rows: list[list[int]], settings: dict[str, Any]) -> TokenGenerator:
        """A generator whose cache is just large enough."""
        _check_text(settings)
        longest = max(map(len, rows))
        room = longest + settings["max_new_tokens"]
        merged = {"max_seq_len": max(room, 1), **self.settings, **settings}
        merged.pop("max_length", None)
        return TokenGenerator(self.model, tokenizer=self.tokenizer, **merged)

    def _encode(self, prompt: str) -> list[int]:
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ValueError("the prompt is empty; give at least one character")
        return ids

    @staticmethod
    def _without_eos(generator: TokenGenerator, tokens: Iterator[int]) -> Iterator[int]:
        """Tokens up to the one that ends the text, without it."""
        for token in tokens:
            if token in generator.eos_ids:
                return
            yield token


def _check_text(settings: dict[str, Any]) -> None:
    """Raises ValueError for settings with which a prompt would not give exactly one text."""
    if settings.get("max_length") is not None:
        raise ValueError(
            f"max_length is {settings['max_length']!r}; here max_new_tokens says how long a text gets"
        )
    for name in NO_TEXT:
        value = settings.get(name)
        if value is True or (value or 0) > 1:
            raise ValueError(
                f"{name} is {value!r}; a prompt gives one text here, see caramba_fast.infer.Generator"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: loads a checkpoint, generates, prints."""
    parser = argparse.ArgumentParser(
        "python -m caramba_fast.inference.generate", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("checkpoint", nargs="?", default=demo_path(), help="checkpoint folder")
    parser.add_argument("--tokenizer", default=None, help="tokenizer folder, if it is another one")
    parser.add_argument("--prompt", default="Hello world")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(arguments)
    try:
        generator = Generator(given.checkpoint, given.tokenizer, given.device, log=print)
        text = generator.generate(
            given.prompt, given.max_new_tokens, given.temperature, given.top_p, seed=given.seed
        )
    except (ValueError, OSError, ModuleNotFoundError, TypeError) as error:
        parser.exit(1, f"error: {error}\n")
    print(f"\nPrompt: {given.prompt}\n{RULE}\n{text}\n{RULE}")


if __name__ == "__main__":
    main()
