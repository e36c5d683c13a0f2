"""EngineConfig: memory, limits and policies of an `Engine`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from caramba_fast.infer.fields import Fields


class EngineConfig(Fields):
    """Memory, limits and policies of an `Engine`.

    The `GenerateConfig` beside it says how the cache is stored and what the default settings of requests are.

    Attributes:
        page_size: tokens per page, a multiple of 32. Prefixes are shared in whole pages, and a request wastes half a
            page on average. From 64 on, tokens are exactly those of a contiguous cache; 4-bit kinds in pages of 32
            agree up to the arithmetic of the kernels.
        num_pages: pages of the pool.
        cache_bytes: bytes the pool may take, instead of num_pages. Without either, the pool holds max_batch_size
            requests of max_seq_len tokens.
        max_batch_size: sequences that run at once (vLLM's max_num_seqs); each answer of a request counts.
        max_batch_tokens: tokens of one forward pass: those of decoding sequences first, then chunks of prompts
            (vLLM's max_num_batched_tokens); at least max_batch_size * (1 + lookup_tokens).
        max_waiting: requests that may wait; more are refused with `EngineFullError`.
        max_prompt_chars: longest text prompt in characters; longer ones are refused before they are tokenized. The
            default is max_seq_len times the longest token of the vocabulary: no longer text could fit, unless the
            tokenizer's normalizer shortens it. No limit if the tokenizer has no ``get_vocab``.
        max_stop_chars: characters of all stop strings of a request; they are searched for at every token.
        max_edit_ids: ids in bad_words_ids and sequence_bias of a request; they are checked at every token.
        max_ngram: largest no_repeat_ngram_size of a request.
        max_logprobs: largest logprobs of a request.
        max_structure_chars: characters of the schema, regular expression or grammar of structured_outputs; it is
            compiled when the request is added.
        fair_tokens: when others wait for a slot or pages, a sequence that has generated this many tokens in its turn is
            preempted and continues after them.
        prefix_caching: keep pages of finished requests until their space is needed, and reuse them for requests of
            the same ``cache_salt`` that begin alike.
        cache_salt: the salt of requests that give none. With None they share with nobody, except that requests of one
            `Engine.generate_batch` share with each other. Timing and metrics reveal what a request found, so requests
            of one salt can guess each other's prompts: give a salt only to those who may.
        prefix_store: a folder that keeps full pages of finished requests across restarts, for requests of the same
            ``cache_salt``, model, storage and tokens. It holds prompts and answers; only one process at a time may
            use it. None for no folder.
        prefix_store_bytes: most bytes of the folder; the least recently used pages are deleted.
        preemption: how the newest request gives its pages back when pages run out: "recompute" reads its tokens
            again later, "swap" moves the packed bytes to host memory and back.
        swap_bytes: most bytes of host memory for swapped pages; what does not fit is recomputed.
        num_splits: split-KV of attention over several sequences. -1: equal shares of the whole batch, so that a long
            sequence is not the slowest; its rounding then depends on the others. 1 or more: that many parts of each
            sequence, by its own length alone (batch invariant). 0: the kernels choose by the batch's shape.
        lookup_tokens: draft tokens by prompt lookup for each decoding sequence and step, 0 for none. The tokens of a
            request do not change, sampled or not.
    """

    page_size: int = Field(default=64, ge=32, multiple_of=32)
    num_pages: int | None = Field(default=None, ge=1)
    cache_bytes: int | None = Field(default=None, ge=1)
    max_batch_size: int = Field(default=16, ge=1)
    max_batch_tokens: int = Field(default=512, ge=1)
    max_waiting: int = Field(default=100_000, ge=1)
    max_prompt_chars: int | None = Field(default=None, ge=1)
    max_stop_chars: int = Field(default=1024, ge=0)
    max_edit_ids: int = Field(default=1024, ge=0)
    max_ngram: int = Field(default=64, ge=0)
    max_logprobs: int = Field(default=20, ge=0)
    max_structure_chars: int = Field(default=65_536, ge=0)
    fair_tokens: int = Field(default=256, ge=1)
    prefix_caching: bool = True
    cache_salt: str | None = Field(default=None, min_length=1)
    prefix_store: Path | None = None
    prefix_store_bytes: int = Field(default=4 * 2**30, ge=1)
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_bytes: int = Field(default=2**30, ge=0)
    num_splits: int = Field(default=-1, ge=-1, le=128)
    lookup_tokens: int = Field(default=0, ge=0, le=31)

    @model_validator(mode="after")
    def _sizes_agree(self) -> EngineConfig:
        if self.prefix_store is not None and not self.prefix_caching:
            raise ValueError(
                "prefix_store is given and prefix_caching is False; a store needs True"
            )
        if self.prefix_store is None and "prefix_store_bytes" in self.model_fields_set:
            raise ValueError(
                f"prefix_store_bytes is {self.prefix_store_bytes}, and there is no prefix_store; give a folder"
            )
        if self.num_pages is not None and self.cache_bytes is not None:
            raise ValueError("num_pages and cache_bytes are both given; give one of them")
        if self.max_batch_tokens < self.max_batch_size * (1 + self.lookup_tokens):
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}; every one of max_batch_size={self.max_batch_size} "
                f"requests needs {1 + self.lookup_tokens} in a step, "
                f"{self.max_batch_size * (1 + self.lookup_tokens)} or more are allowed"
            )
        return self
