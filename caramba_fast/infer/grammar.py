"""Structured output: new tokens must match a JSON schema, a regular expression or a grammar.

llguidance computes which tokens may follow. It rejects a schema it cannot enforce, naming the keyword.
"""

from __future__ import annotations

import json
from array import array
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from caramba_fast.infer.config import GenerateConfig
from caramba_fast.infer.sequence import TokenSequence

#: Whitespace between the parts of JSON: enough to indent, and limited so that a model cannot write it forever.
BLANKS = r"[ \n\t]{1,32}"
#: llguidance's tokenizers, which are slow to make: by tokenizer, then by vocabulary size and eos ids.
_TOKENIZERS: WeakKeyDictionary[Any, dict[tuple[int, frozenset[int]], Any]] = WeakKeyDictionary()


class Grammar:
    """A constraint on the new tokens of each row.

    Args:
        source: the grammar in llguidance's format.
        tokenizer: llguidance's.
        vocab_size: number of logits.

    Raises:
        ValueError: an invalid grammar, or one that nothing matches; the message says why.
    """

    def __init__(self, source: str, tokenizer: Any, vocab_size: int) -> None:
        import llguidance  # noqa: PLC0415 - an extra

        self._vocab, self._known = vocab_size, tokenizer.vocab_size
        self._rows: dict[int, _Row] = {}
        # Compiled once, which may take a second; each row has a copy.
        self._first: Any = llguidance.LLMatcher(tokenizer, source, log_level=0)
        if not self._new_row().allowed(array("q"), vocab_size).any():
            raise ValueError("structured_outputs: nothing fits it")

    def mask(self, scores: Tensor, row: TokenSequence, index: int) -> None:
        """Sets scores (V,) of ids that may not follow to -inf, in place.

        Args:
            row: its tokens after ``row.start`` must match the grammar.
            index: index of the row; tokens matched in earlier calls are not matched again.

        Raises:
            ValueError: the tokens do not match, or the grammar is too complex.
        """
        if index not in self._rows:
            self._rows[index] = self._new_row()
        allowed = self._rows[index].allowed(row.tokens[row.start :], self._vocab)
        scores.masked_fill_(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _new_row(self) -> _Row:
        matcher = self._first if self._first.is_error() else self._first.deep_copy()
        return _Row(matcher, self._known)


class _Row:
    """The state of one row in the grammar."""

    def __init__(self, matcher: Any, known: int) -> None:
        self._matcher, self._read = matcher, array("q")
        self._known = known  # ids of the tokenizer
        #: Whether the matcher may have consumed other tokens than those in ``_read``: after an interrupt or an error.
        self._is_unsure = False
        self._check()

    def allowed(self, tokens: array[int], vocab_size: int) -> np.ndarray:
        """(V,) bool: which ids may follow; tokens removed since the last call are rolled back."""
        if self._is_unsure:
            self._matcher.reset()
            self._read = array("q")
        self._is_unsure = True
        same = len(self._read)
        while self._read[:same] != tokens[:same]:
            same -= 1
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        for token in tokens[same:]:
            if self._matcher.is_stopped():
                break  # complete: only an eos id may follow
            self._matcher.consume_token(token)
            self._check()
            self._read.append(token)
        self._is_unsure = False
        bits = np.zeros((self._known + 31) // 32, dtype=np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        self._check()
        return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(bool)

    def _check(self) -> None:
        if self._matcher.is_error():
            said = str(self._matcher.get_error()).split("\n<state>")[0]
            raise ValueError(f"structured_outputs: {said}")


def grammar_of(
    config: GenerateConfig, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]
) -> Grammar | None:
    """The grammar of a config, or None.

    Args:
        tokenizer: the model's, as `TextTokenizer` takes it, or None.
        vocab_size: number of logits.
        eos_ids: ids that end a row; they may follow once the grammar is complete.

    Raises:
        ValueError: an invalid grammar, a schema keyword that cannot be enforced, no eos id, or a tokenizer whose
            vocabulary cannot be read.
        ModuleNotFoundError: llguidance is missing.
    """
    asked = config.structured_outputs
    if asked is None:
        return None
    if find_spec("llguidance") is None:
        raise ModuleNotFoundError(
            "structured_outputs (response_format) needs llguidance: pip install llguidance"
        )
    if not eos_ids:
        raise ValueError(
            "structured_outputs needs an end-of-sequence id, which ends the answer when it is complete; there is none "
            "(ignore_eos, or a model without one)"
        )
    made = _tokenizer(tokenizer, vocab_size, eos_ids)
    import llguidance  # noqa: PLC0415 - an extra

    matcher: Any = llguidance.LLMatcher
    blanks = {"whitespace_pattern": BLANKS}
    try:
        if asked.regex is not None:
            source = matcher.grammar_from_regex(asked.regex)
        elif asked.grammar is not None:
            source = matcher.grammar_from_lark(asked.grammar)
        else:
            schema = {"type": "object"} if asked.json_object else asked.json_schema
            text = schema if isinstance(schema, str) else json.dumps(schema)
            source = matcher.grammar_from_json_schema(text, overrides=blanks)
    except ValueError as error:
        raise ValueError(f"structured_outputs: {error}") from error
    return Grammar(source, made, vocab_size)


def _tokenizer(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    import llguidance  # noqa: PLC0415 - an extra

    inner = getattr(tokenizer, "tokenizer", tokenizer)  # of a TextTokenizer
    inner = getattr(inner, "backend_tokenizer", inner)  # of a fast one of transformers
    if not callable(getattr(inner, "to_str", None)):
        what = "there is none" if tokenizer is None else f"this one is a {type(inner).__name__}"
        raise ValueError(
            f"structured_outputs needs a tokenizer of tokenizers or a fast one of transformers; {what}"
        )
    known = _TOKENIZERS.setdefault(inner, {})
    key = vocab_size, eos_ids
    if key not in known:
        # Either may have more ids: logits are padded, and tokens added that the model never says.
        most = max(vocab_size, 1 + max(inner.get_vocab().values(), default=0))
        known[key] = llguidance.LLTokenizer(inner.to_str(), n_vocab=most, eos_token=sorted(eos_ids))
    return known[key]
