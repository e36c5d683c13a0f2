"""Log-probabilities in the format of OpenAI's API, for chats and for completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from caramba_fast.infer.logprobs import TokenLogprobs
from caramba_fast.infer.tokenizer import TextTokenizer

#: Log-probability of (nearly) impossible tokens, as in OpenAI's API: JSON has no infinity.
LEAST = -9999.0


class TokenTexts:
    """Text of single tokens: each is decoded after another one, because decoders drop a leading space."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._decode = tokenizer.decode
        self._before = tokenizer.encode("a", special=False)[-1:]
        self._first = self._decode(self._before, skip_special_tokens=False)
        self.of = lru_cache(2**16)(self._of)

    def _of(self, token: int) -> str:
        text = self._decode([*self._before, token], skip_special_tokens=False)
        return text[len(self._first) :]


class LogprobsWriter:
    """Holds the log-probabilities of a response until they are sent; ``chat`` selects the format."""

    def __init__(self, texts: TokenTexts, chat: bool) -> None:
        self._text, self._chat = texts.of, chat
        self._held: dict[int, list[TokenLogprobs]] = defaultdict(list)
        self._offset: dict[int, int] = defaultdict(int)

    def put(self, answer: int, entries: Sequence[TokenLogprobs]) -> None:
        """Adds those of new tokens."""
        self._held[answer] += entries

    def take(self, answer: int) -> dict[str, Any] | None:
        """Those not sent yet; None if there are none."""
        entries = self._held.pop(answer, None)
        if not entries:
            return None
        if self._chat:
            return {"content": [self._entry(one) for one in entries], "refusal": None}
        return self._columns(answer, entries)

    def _entry(self, one: TokenLogprobs) -> dict[str, Any]:
        best = [self._named(token, value) for token, value in one.top]
        return {**self._named(one.token, one.logprob), "top_logprobs": best}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self._text(token)
        part = "\ufffd" in text  # of a character: its bytes are unknown
        known = None if part else list(text.encode())
        return {"token": text, "logprob": max(value, LEAST), "bytes": known}

    def _columns(self, answer: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []
        }  # fmt: skip
        for one in entries:
            text, value = self._text(one.token), max(one.logprob, LEAST)
            found["tokens"].append(text)
            found["token_logprobs"].append(value)
            best = {self._text(token): max(each, LEAST) for token, each in reversed(one.top)}
            found["top_logprobs"].append({**best, text: value})
            found["text_offset"].append(self._offset[answer])
            self._offset[answer] += len(text)
        return found
