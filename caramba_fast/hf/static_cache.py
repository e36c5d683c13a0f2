"""CarambaStaticCache: packed layers of fixed size, for ``torch.compile(fullgraph=True)`` and CUDA graphs.

CarambaStaticLayer: a packed layer of fixed size whose decode step is a few ops on plain tensors.

Nothing of a step depends on the host: lengths are tensors, all slots are named, so that ``torch.compile`` makes
one graph of it, and a CUDA graph can replay it. ``update`` returns the codes; attention, which comes next, finds
the layer they belong to in `current`.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from caramba_fast.cache import LayerKVCache
from caramba_fast.hf.capabilities import PerModel, evaluating
from caramba_fast.hf.compat import lenders, query_length, tokens_to_remove
from caramba_fast.hf.layers import CarambaLayer, Common
from caramba_fast.hf.masks import expect_compiled_mask, expect_mask
from caramba_fast.hf.packed_cache import CarambaCache, known_shapes
from caramba_fast.hf.scope import NAME, decoder_configs, implementation, once
from caramba_fast.hf.settings import CacheArgument, CacheSettings
from caramba_fast.ops import KVView, append_, decode_attention, extend_attention
from caramba_fast.ops.attention_call import MAX_QUERY_TOKENS


class Current(threading.local):
    """The static layer that this thread has updated last: the one whose attention comes next."""

    layer: CarambaStaticLayer | None = None


class Traced:
    """The same in compiled code, which cannot hold guards on a `threading.local`."""

    layer: CarambaStaticLayer | None = None


current, traced = Current(), Traced()
_CODES = WeakTensorKeyDictionary()  # of every static layer, to tell codes from keys


class CarambaStaticLayer(StaticLayer):
    """K and V of one attention layer, packed, for ``max_cache_len`` tokens a row.

    Args:
        max_cache_len: tokens a row has room for.
        maker: makes the store: a `CarambaLayer` of the same settings.

    Attributes:
        counted: tokens the host knows of; compiled steps add some it does not see.
        sources: the newest keys and values, if gradients were to flow to them.
    """

    is_compileable = True
    is_croppable = True
    sources: tuple[Tensor, ...] = ()

    def __init__(self, max_cache_len: int, maker: CarambaLayer) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.cumulative_length = torch.tensor(0)  # before 5.x a static layer has none
        self.maker = maker
        self.window = None if maker.chunked else maker.sliding_window
        self.chunk = maker.sliding_window if maker.chunked else None
        self.is_sliding = maker.is_sliding
        self.is_empty = True
        self.counted = 0
        self.k: KVView | None = None
        self.v: KVView | None = None

    def __repr__(self) -> str:
        return f"CarambaStaticLayer({self.max_cache_len} tokens)"

    @property
    def common(self) -> Common:
        """What all layers of the cache share."""
        return self.maker.common

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.maker.nbytes

    # -- growing ------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Allocates everything for keys and values like these (B, H_kv, T, D)."""
        self.maker.common.room = self.max_cache_len
        self.maker.lazy_initialization(key_states, value_states)
        store = self._store()
        batch, device = store.batch_size, store.device
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, batch
        self.n_kv_heads, self.residual_len = store.n_kv_heads, store.residual_len
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.starts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.cumulative_length = self.cumulative_length.to(device)
        self._look()
        if not torch.compiler.is_compiling():
            for tensor in (self.cumulative_length, *self._buffers()):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def _store(self) -> LayerKVCache:
        store = self.maker.store
        assert store is not None
        return store

    def _look(self) -> None:
        """Takes the buffers and constants of the store: what compiled steps work on."""
        store = self._store()
        self.k, self.v = store.k.view, store.v.view
        self.keys: Tensor | None = self.k.codes
        self.values: Tensor | None = self.v.codes
        if not torch.compiler.is_compiling():
            _CODES[self.keys] = None

    def _buffers(self) -> list[Tensor]:
        store = self._store()
        return [self.lengths, self.starts, *store.k.buffers, *store.v.buffers]

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores (B, H_kv, T, D) keys and values; returns codes, or a first prompt as it came.

        Raises:
            ValueError: more tokens than a row has room for, before anything is written. A compiled step cannot
                raise: what does not fit is dropped there.
        """
        tokens = key_states.shape[2]
        if not torch.compiler.is_compiling():
            self.check_room(self.counted, tokens)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        exact = self.is_empty and self.common.settings.prefill == "exact"
        if self.is_empty and not torch.compiler.is_compiling():
            self._first(key_states.detach(), value_states.detach())
        else:
            assert self.k is not None and self.v is not None
            append_(
                self.k, self.v, key_states.detach(), value_states.detach(), self.lengths,
                cache_leftpad=self.starts,
            )  # fmt: skip
            self._advance(tokens)
        if torch.compiler.is_compiling():
            traced.layer = None if exact else self
        else:
            current.layer = None if exact else self
        if exact:
            return key_states, value_states
        if not torch.compiler.is_compiling():
            self.sources = (key_states, value_states) if torch.is_grad_enabled() else ()
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _advance(self, tokens: int) -> None:
        self.lengths.add_(tokens)
        self.cumulative_length.add_(tokens)
        self.is_empty = False
        if not torch.compiler.is_compiling():
            self.counted += tokens

    def check_room(self, held: int, tokens: int) -> None:
        """Raises ValueError where ``tokens`` more than ``held`` do not fit."""
        if held + tokens > self.max_cache_len:
            raise ValueError(
                f"{self.common.model}: a row of the static cache has room for {self.max_cache_len} tokens, holds "
                f"{held}, and {tokens} more came; make a CarambaStaticCache with a larger max_cache_len"
            )

    def count(self) -> int:
        """Tokens of a row, compiled steps included: read from the device."""
        self.counted = int(self.cumulative_length) if self.is_initialized else 0
        return self.counted

    def _first(self, keys: Tensor, values: Tensor) -> None:
        """The first tokens, from which constants are taken."""
        if keys.shape[0] != self.batch_size:
            raise ValueError(
                f"{self.common.model}: the static cache has {self.batch_size} rows, and {keys.shape[0]} came; "
                "make another one"
            )
        self.take_starts()
        store = self._store()
        store.append(keys, values, cache_leftpad=self.common.leftpad, will_attend=False)
        self._look()
        self._advance(keys.shape[2])

    def take_known_constants(self) -> None:
        """Takes the constants that are known without a prompt."""
        self._store().take_constants()
        self._look()

    def take_starts(self) -> None:
        """Takes over where rows start, for the steps to come."""
        leftpad = self.common.leftpad
        self.starts.zero_() if leftpad is None else self.starts.copy_(leftpad)

    # -- reading ------------------------------------------------------------------------

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """Attention of the T newest tokens: (B, H_q, T, D) -> (B, H_q, T, D_v)."""
        tokens = query.shape[2]
        starts = self.starts
        if self.window is not None:
            options["window_size"] = (self.window - 1, 0)
        if self.chunk is not None:
            starts = self._chunk_starts(tokens)
        if self.residual_len:
            options["residual_len"] = self.residual_len
        assert self.k is not None and self.v is not None
        op = decode_attention if tokens <= MAX_QUERY_TOKENS else extend_attention
        found = op(
            query, self.k, self.v, self.lengths, n_kv_heads=self.n_kv_heads, cache_leftpad=starts,
            **options,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found

    def _chunk_starts(self, tokens: int) -> Tensor:
        if tokens > 1:
            raise ValueError(
                f"{self.common.model}: attention within chunks takes one token at a time of a static cache; "
                "prefill at once, or use CarambaCache"
            )
        assert self.chunk is not None
        newest = self.lengths - 1 - self.starts
        return self.starts + torch.div(newest, self.chunk, rounding_mode="floor") * self.chunk

    # -- moving -------------------------------------------------------------------------

    def get_seq_length(self, *_: Any) -> Any:
        """Tokens cached, as a tensor on the device; 0 before the first."""
        return self.cumulative_length if self.is_initialized else 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """All slots, from the first."""
        return self.max_cache_len, 0

    def get_max_cache_shape(self) -> int:
        """Tokens a row has room for: the name it had in transformers 4."""
        return self.max_cache_len

    def reset(self) -> None:
        """Forgets everything; the memory stays where it is."""
        if self.is_initialized:
            self._store().reset()
            self.lengths.zero_()
            self.starts.zero_()
            self.cumulative_length.zero_()
            self._look()
        self.is_empty, self.counted = True, 0

    def activate_past_recording(self) -> None:
        """Nothing to do: no token is left behind."""

    def crop(self, count: int) -> None:
        """Takes tokens off the end; ``count`` is what `Cache.crop` takes in this transformers.

        Reads the length from the device: not for compiled steps.
        """
        if not self.is_initialized:
            return
        held = self.count()
        removed = min(tokens_to_remove(count, held), held)
        store = self._store()
        for _ in range(held - store.pos):  # steps write without the store's host knowing
            store.after_replay()
        store.crop(removed)
        self.lengths.sub_(removed)
        self.cumulative_length.sub_(removed)
        self.counted = held - removed
        self.is_empty = not self.counted

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        if self.is_initialized:
            index = beam_idx.to(self.lengths.device)
            for buffer in self._buffers():
                buffer.copy_(buffer.index_select(0, index))


def attended_layer(key: Any) -> CarambaStaticLayer | None:
    """The static layer whose codes ``key`` is, if this thread has updated it last; once for each update."""
    for place in (traced,) if torch.compiler.is_compiling() else (current, traced):
        layer = place.layer
        if layer is not None and key is layer.keys:
            place.layer = None  # a cache lives no longer than its owner wants
            return layer
    return None


def check_no_codes(key: Tensor) -> None:
    """Raises RuntimeError for the codes of a static layer that attention was not to come for."""
    known = not torch.compiler.is_compiling() and key in _CODES
    if known or not key.is_floating_point():
        raise RuntimeError(
            "attention got the codes of a static cache whose update was not the last one of this thread: "
            "CarambaStaticCache needs models whose layers attend in the thread that updates, once for each update; "
            "use CarambaCache"
        )


class CarambaStaticCache(Cache):
    """``past_key_values`` of fixed size: as `CarambaCache`, with nothing of a decode step on the host.

    Prompts run uncompiled, as with transformers' own static cache. Another cache of the same sizes does not make
    ``torch.compile`` compile again. It can be cropped between steps; transformers takes it for prompt lookup and
    assistants from 5.1 on.

    Args:
        model: the model it is for, which must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``).
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_cache_len: tokens a row has room for. More raise where masks are made outside of compiled code, as in
            `generate`; a forward pass that is compiled as a whole cannot raise, and drops them.
        options: as in `CacheSettings.of`.

    Raises:
        TypeError: a model whose attention needs keys and values as tensors, or has layers of other kinds.
        ValueError: our attention is not in use, or a kind or setting that does not exist.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheArgument = "q4",
        *,
        max_cache_len: int,
        **options: Any,
    ) -> None:
        self._make(model, CacheSettings.of(cache, **options), max_cache_len)

    @classmethod
    def of(
        cls, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int
    ) -> CarambaStaticCache:
        """The same, from settings that are made already."""
        made = cls.__new__(cls)
        made._make(model, settings, max_cache_len)
        return made

    def _make(self, model: PreTrainedModel, settings: CacheSettings, max_cache_len: int) -> None:
        check_reads_packed(model)
        makers = CarambaCache.of(model, settings, max_cache_len)
        self.common: Common = makers.common
        layers: list[Any] = []
        for maker in makers.layers:
            assert isinstance(maker, CarambaLayer)
            layers.append(CarambaStaticLayer(max_cache_len, maker))
        super().__init__(layers=layers)

    def initialize(self, model: PreTrainedModel, rows: int) -> None:
        """Allocates all layers for so many rows, before the first tokens: for prompts that run compiled, too.

        Constants of ``center`` and ``scale`` come from an uncompiled first prompt, else from calibration alone.

        Args:
            model: the one it is for; what its layers store is found by asking it.
        """
        settings = self.common.settings
        if settings.takes_constants and settings.calibration is None:
            once(
                self.common.config,
                "compiled prompt",
                f"cache={settings.name!r} takes constants from the first prompt, which a compiled forward pass does "
                "not show: calibrate (calibration=…), or leave the prompt uncompiled, as generate() does by itself",
            )
        embeddings: Any = model.get_input_embeddings()
        like = embeddings.weight
        for index, shape in known_shapes(model).items():
            heads = (rows, shape.n_kv_heads, 0)
            k, v = (
                torch.empty(*heads, dim // shape.n_kv_heads, dtype=like.dtype, device=like.device)
                for dim in (shape.k_dim, shape.v_dim)
            )
            self.layers[index].lazy_initialization(k, v)
            self.layers[index].take_known_constants()

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def max_cache_len(self) -> int:
        """Tokens a row has room for."""
        return int(self.layers[0].max_cache_len)

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Slots a layer returns, and the first one; the mask function is called next.

        Raises:
            ValueError: the tokens that are coming do not fit, before any is written.
        """
        sizes = super().get_mask_sizes(given, layer_idx)
        if torch.compiler.is_compiling():
            expect_compiled_mask(self)
        else:
            self._check_room(query_length(given))
            expect_mask(self, sizes[0])
        return sizes

    def _check_room(self, tokens: int) -> None:
        """Reads the length from the device, but not while a CUDA graph is recorded, which could not hold that."""
        layer = self.layers[0]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        layer.check_room(layer.count(), tokens)

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Where rows start, (B,) or None for 0, told by masks; False where that contradicts what is stored."""
        before, first = self.common.leftpad, self.layers[0]
        if not self.common.rows_start_at(leftpad, first.counted):
            return False
        if self.common.leftpad is not before and not first.is_empty:
            for layer in self.layers:
                layer.take_starts()
        return True

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        super().reorder_cache(beam_idx)
        leftpad = self.common.leftpad
        if leftpad is not None:
            self.common.leftpad = leftpad[beam_idx.to(leftpad.device)]

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed(f"batch_repeat_interleave({repeats})")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed(f"batch_select_indices of {indices.numel()}")

    def offload(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed(f"offload({layer_idx})")

    def prefetch(self, layer_idx: int, *_: Any, **__: Any) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed(f"prefetch({layer_idx})")

    def state_dict(self) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed("state_dict")

    def load_state_dict(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: see `_fixed`."""
        self._fixed("load_state_dict")

    def _fixed(self, asked: str) -> NoReturn:
        """Raises NotImplementedError: rows, places and buffers stay what compiled steps were made for."""
        raise NotImplementedError(
            f"CarambaStaticCache has no {asked}: its rows and memory stay as they are, for compiled steps; use "
            "CarambaCache (or pickle this one, to keep it)"
        )

    @property
    def exact_next(self) -> bool:
        """Whether the tokens that come next attend to each other as they are, by any mask."""
        return bool(self.layers[0].is_empty and self.common.settings.prefill == "exact")

    def reset(self) -> None:
        """Forgets everything; the memory stays where it is."""
        super().reset()
        self.common.leftpad = None


_DEQUANTIZATIONS = PerModel[int]()


def check_reads_packed(model: PreTrainedModel) -> None:
    """Raises where a step of ``model`` asks the cache for tensors: two small forward passes, once.

    Raises:
        TypeError: it does, or it has layers that are not packed.
        ValueError: it does not use our attention.
    """
    name = type(model).__name__
    if not decoder_configs(model):
        raise TypeError(
            f"the attention of {name} is not on the attention interface of transformers, so it cannot read a static "
            "cache; use CarambaCache (cache_implementation=None), which gives it tensors"
        )
    if implementation(model.config.get_text_config(decoder=True)) != NAME:
        raise ValueError(
            f"{name} does not use our attention, which a static cache needs: accelerate(model), or register() "
            f'and model.set_attn_implementation("{NAME}")'
        )
    if lenders(model.config.get_text_config(decoder=True)):
        raise TypeError(
            f"{name} has layers that attend to keys and values of earlier ones, which a static cache gives once; "
            "use CarambaCache"
        )
    if _DEQUANTIZATIONS.of(model, _dequantizations):
        raise TypeError(
            f"the attention of {name} needs keys and values as tensors, which a static cache does not have; "
            "use CarambaCache"
        )


@torch.no_grad()
def _dequantizations(model: PreTrainedModel) -> int:
    """How many a prompt and a step take."""
    cache = CarambaCache(model, "fp32")
    if not all(type(layer) is CarambaLayer for layer in cache.layers):
        raise TypeError(
            f"{type(model).__name__} has layers of other kinds than attention; use CarambaCache"
        )
    embeddings: Any = model.get_input_embeddings()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=embeddings.weight.device)
    with warnings.catch_warnings(), evaluating(model):
        warnings.simplefilter("ignore")
        for part in (ids, ids[:, :1]):
            model(input_ids=part, past_key_values=cache, use_cache=True)
    return cache.dequantizations
