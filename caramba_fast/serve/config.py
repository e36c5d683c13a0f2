"""EngineConfig: what an engine has to work with, and how it shares it out."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from caramba_fast.infer.fields import Fields


class EngineConfig(Fields):
    """Memory, limits and policies of an `Engine`.

    How the cache is stored, and what requests get that say nothing else, is in the `GenerateConfig` beside it.

    Attributes:
        page_size: tokens of a page, a multiple of 32. Prefixes are shared by whole pages, and a request wastes
            half a page on average. From 64 on, tokens are the very ones a contiguous cache gives; 4-bit kinds in
            pages of 32 agree up to the arithmetic of the kernels.
        num_pages: pages of the pool; or
        cache_bytes: bytes the pool may take, from which the pages follow. With neither, there are enough for
            max_batch_size requests of max_seq_len tokens.
        max_batch_size: requests that are worked on at once (vLLM's max_num_seqs), answers counted one by one.
        max_batch_tokens: tokens of one forward pass: what is decoded, and prompts in chunks of what is left (vLLM's
            max_num_batched_tokens).
        max_waiting: requests that may wait; more are refused with `EngineFullError`.
        max_prompt_chars: characters a prompt of text may have; more are refused before they are tokenized. By default
            max_seq_len times the longest token of the vocabulary: no text of more characters could fit, unless the
            tokenizer's normalizer shortens it. Without a vocabulary to look at (``get_vocab``) there is no limit.
        max_stop_chars: characters of all stop strings of a request, which are looked for at every token.
        max_edit_ids: ids in the bad_words_ids and sequence_bias of a request, which are gone through at every token.
        max_ngram: largest no_repeat_ngram_size of a request.
        max_logprobs: largest logprobs of a request.
        max_structure_chars: characters of the schema, expression or grammar of structured_outputs, which is read before
            the request is taken on.
        fair_tokens: tokens of a turn: an answer that has generated so many gives way where others wait for its place
            or pages, and goes on behind them.
        prefix_caching: keep pages of requests that have ended until their room is needed, and let others of the
            same ``cache_salt`` begin with them.
        cache_salt: the salt of requests that give none. With None they share with nobody; requests of one
            `Engine.generate_batch` share with each other. What a request finds can be told from its time and its
            metrics, so that requests of one salt can guess each other's prompts: give one to those who may.
        prefix_store: a folder for full pages of requests that have ended, which are found again after a restart: by
            requests of the same ``cache_salt``, for the same model, storage and tokens. It holds prompts and answers;
            one process at a time may use it. None keeps none.
        prefix_store_bytes: most bytes in it; pages used longest ago go.
        preemption: when pages run out, the newest request gives its own back: "recompute" feeds its tokens
            again later, "swap" moves the packed bytes to host memory and back.
        swap_bytes: most host memory for that; what does not fit is recomputed.
        num_splits: how attention over several sequences is cut. -1: into equal shares of all, so that a long sequence
            does not wait for itself; how one is rounded then depends on the others. 1 or more: each sequence into so
            many parts, by its own length alone, whatever else is in the batch. 0: by what the batch's shape makes fast.
        lookup_tokens: tokens drafted by prompt lookup for each decoding request and step, 0 for none. Tokens are
            those it would get without, sampled or not.
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
