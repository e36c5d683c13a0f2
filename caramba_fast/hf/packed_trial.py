"""Small forward passes that find out how attention can read a model's caches.

Configs do not say how a model's code treats padding, or what it does to K and V between cache and attention.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache import (
    AnyLayerShape,
    LayerShape,
    ModelKVCache,
    PagePool,
    RaggedBatch,
    Stretch,
)
from caramba_fast.config import KVCacheKind, KVCacheTensorConfig
from caramba_fast.hf.compat import CACHE, stock_layers
from caramba_fast.hf.growing_layer import CarambaLayer
from caramba_fast.hf.hybrid_layer import packed_layers
from caramba_fast.hf.layers import Common, TensorsNeededError
from caramba_fast.hf.masks import pattern_of
from caramba_fast.hf.probe import evaluating
from caramba_fast.hf.row_layout import RightPadded
from caramba_fast.hf.scope import inside, our_attention
from caramba_fast.hf.settings import CacheSettings
from caramba_fast.hf.step_cache import PackedCache, StepCache
from caramba_fast.models.query_rms import FAILURES

#: New tokens of each of two rows, in each of two passes.
TRIAL = ([3, 5], [1, 2])
#: Largest relative difference of logits that needs no explanation; a position off by one causes more.
MOST_DIFFERENCE = 0.05
#: In half precision rounding may cause more, above all where it changes which experts are chosen. Of so many attempts
#: with other tokens one has to differ no more than rounded embeddings make the model's own logits differ, at most this,
#: and half of what the last token one position further on does where that matters.
ATTEMPTS, MOST_ROUNDING = 3, 0.5
#: What the model itself gives an attempt, as a function of how much further on its last token is.
Reference = Callable[[int], list[Tensor]]
#: Reads all rows and the number of next tokens to read of each; returns the logits (V,) after each row's last one.
Read = Callable[[list[list[int]], list[int]], list[Tensor]]
#: Why the cache of an already compiled model is dequantized.
COMPILED = (
    "its forward is compiled by torch.compile, which cannot read layers as they are stored: give us the model as it "
    "was before"
)


@torch.no_grad()
def padding_error(model: PreTrainedModel) -> float:
    """Relative difference that left padding makes to a row's logits: the larger of without a cache and a cached step.

    0 if it is no more than rounding explains. GIT is a model where it matters: it prepends image columns to the mask of
    a step, with or without an image.
    """
    embeddings: Any = model.get_input_embeddings()
    device, most = embeddings.weight.device, len(embeddings.weight)
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    places = torch.tensor([[0, 0, 0, 1, 2]], device=device)
    takes = "position_ids" in inspect.signature(model.forward).parameters

    def last_logits(
        ids: Tensor, start: int, stop: int = 5, cache: Cache | None = None, further: int = 0
    ) -> Tensor:
        moved = places + further * (places == places.max())
        options = {"position_ids": moved[:, start:stop]} if takes else {}
        first = start if cache is None or not cache.get_seq_length() else 0
        out = model(
            input_ids=ids[:, start:stop], attention_mask=mask[:, first:stop],
            use_cache=cache is not None, **{CACHE: cache}, **options,
        )  # fmt: skip
        return out.logits[:, -1].float()

    def tried(attempt: int) -> tuple[list[Tensor], Reference]:
        ids = torch.tensor([[(i + 29 * attempt) % most for i in (0, 0, 7, 11, 13)]], device=device)
        padded = [last_logits(ids, 0)]
        cache = Cache(layers=stock_layers(model.config.get_text_config(decoder=True)))
        last_logits(ids, 0, 4, cache)
        padded.append(last_logits(ids, 4, 5, cache))
        return padded, lambda further: [last_logits(ids, 2, further=further)] * 2

    with evaluating(model):
        return _unexplained(model, tried)


def _unexplained(
    model: PreTrainedModel, tried: Callable[[int], tuple[list[Tensor], Reference]]
) -> float:
    """The least relative difference of attempts, 0 if rounding explains that of one.

    ``tried`` takes the attempt's number; it returns the logits found, and the model's own.
    """
    eps, least = _eps(model), inf
    for attempt in range(1 if eps < 1e-5 else ATTEMPTS):
        found, reference = tried(attempt)
        wanted = reference(0)

        def apart(other: list[Tensor], wanted: list[Tensor] = wanted) -> float:
            return max(map(_difference, other, wanted))

        least = min(least, apart(found))
        if least <= MOST_DIFFERENCE:
            return 0.0
        with _rounded(model, eps, attempt):
            most = min(apart(reference(0)), MOST_ROUNDING)
        wrong = apart(reference(1))
        if apart(found) <= (min(most, wrong / 2) if wrong > MOST_DIFFERENCE else most):
            return 0.0
    return least


def _eps(model: PreTrainedModel) -> float:
    """The spacing of numbers after 1 in the coarsest dtype that the model may compute in (quantized weights: bf16)."""
    kind = _device(model).type
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    known = (torch.float32, torch.float16, torch.bfloat16)
    return max(torch.finfo(x if x in known else torch.bfloat16).eps for x in dtypes)


@contextmanager
def _rounded(model: PreTrainedModel, eps: float, seed: int) -> Iterator[None]:
    """Context in which embeddings that this thread looks up are changed by about ``eps`` of their size."""
    embeddings: Any = model.get_input_embeddings()
    thread, rng = threading.get_ident(), torch.Generator().manual_seed(seed)

    def changed(_module: Any, _given: Any, found: Any) -> Any:
        if threading.get_ident() != thread or not isinstance(found, Tensor):
            return None
        noise = torch.randn(found.shape, generator=rng, device="cpu").to(found.device)
        return (found.float() * (1 + eps * noise)).to(found.dtype)

    hook = embeddings.register_forward_hook(changed)
    try:
        yield
    finally:
        hook.remove()


def _difference(found: Tensor, wanted: Tensor) -> float:
    """Relative difference; infinite if a value is."""
    apart = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    return apart if isfinite(apart) else inf


@torch.no_grad()
def makes_no_windows(model: PreTrainedModel, configs: list[Any]) -> bool:
    """Whether no mask that the model makes through ``configs`` has a sliding window; False if unknown."""
    embeddings: Any = model.get_input_embeddings()
    ids, found = torch.zeros(1, 2, dtype=torch.int64, device=embeddings.weight.device), list[Any]()
    with evaluating(model), our_attention(configs):
        inside.masks = found.append
        try:
            model(input_ids=ids, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        finally:
            inside.masks = None
    patterns = [pattern_of(function) for function in found]
    return bool(patterns) and all(p is not None and p.window is None for p in patterns)


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether calling the model runs ``torch.compile`` output."""
    whole = getattr(model, "_compiled_call_impl", None) is not None
    return whole or hasattr(model.forward, "_torchdynamo_orig_callable")


def why_not_packed(
    model: PreTrainedModel,
    configs: list[Any],
    shapes: dict[int, AnyLayerShape],
    lenders: Collection[int],
) -> str | None:
    """Why our attention cannot read the model's cache layers packed; None if it can.

    Args:
        configs: configs that must be switched to our attention.
        shapes: layer index -> what that layer caches.
        lenders: as in `StepCache`.
    """
    if is_compiled(model):
        return COMPILED
    if not configs:
        return "its attention is not on the attention interface of transformers"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return (
            "its forward takes no position_ids, by which rows of different lengths are told apart"
        )
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is spread over several devices, and a cache is on one"
    if not all(isinstance(shape, LayerShape) for shape in shapes.values()):
        return "its layers store something else than K and V"
    plain = KVCacheTensorConfig(kind=KVCacheKind.FP32)

    def begin() -> Read:
        cache = ModelKVCache(
            list(shapes.values()), len(TRIAL), 64, plain, plain, _device(model), prefill="stored"
        )

        def read(rows: list[list[int]], new: list[int]) -> list[Tensor]:
            with our_attention(configs):
                return _packed(model, cache, rows, new, list(shapes), lenders)

        return read

    return _why_trial_fails(model, begin)


def why_not_beside(
    model: PreTrainedModel, layout: Sequence[AnyLayerShape], forward: Callable[..., Tensor]
) -> str | None:
    """Why tokens of several requests cannot be packed into one sequence (varlen batch); None if they can.

    ``layout`` is what each caching layer stores; ``forward`` is as `HuggingFaceModel.forward_ragged`.
    """
    plain = KVCacheTensorConfig(kind=KVCacheKind.FP32)

    def begin() -> Read:
        pool = PagePool(layout, 32, len(TRIAL), 32, _device(model), k_cfg=plain, v_cfg=plain)
        held = [0] * len(TRIAL)

        def read(rows: list[list[int]], new: list[int]) -> list[Tensor]:
            stretches = [Stretch(held[b], count, [b]) for b, count in enumerate(new)]
            parts = [
                row[s.start : s.start + s.tokens] for row, s in zip(rows, stretches, strict=True)
            ]
            ids = torch.tensor([*chain(*parts)], device=pool.device)
            ends = torch.tensor([*accumulate(new)], device=pool.device) - 1
            held[:] = [s.start + s.tokens for s in stretches]
            return list(forward(ids, RaggedBatch(stretches, pool), ends).float())

        return read

    return _why_trial_fails(model, begin)


def _device(model: PreTrainedModel) -> torch.device:
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    return device


@torch.no_grad()
def _why_trial_fails(model: PreTrainedModel, begin: Callable[[], Read]) -> str | None:
    """Why packed reads do not work; None if they do.

    Runs rows of different lengths, a prompt and then a chunk. The model must not ask for K and V as tensors, and every
    row must get the logits that the model gives it alone. ``begin`` makes an empty cache and returns what reads into
    it.
    """
    embeddings: Any = model.get_input_embeddings()
    device, most = embeddings.weight.device, len(embeddings.weight)

    def tried(attempt: int) -> tuple[list[Tensor], Reference]:
        rows = [
            [(11 + 7 * i + 3 * b + 29 * attempt) % most for i in range(n + m)]
            for b, (n, m) in enumerate(zip(*TRIAL, strict=True))
        ]
        read = begin()
        for new in TRIAL:
            found = read(rows, new)
        return found, lambda further: [
            _alone(model, torch.tensor([row], device=device), further) for row in rows
        ]

    try:
        with evaluating(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apart = _unexplained(model, tried)
    except torch.OutOfMemoryError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        NotImplementedError,
        IndexError,
    ) as error:
        return (
            str(error)
            if isinstance(error, TensorsNeededError)
            else f"a trial of it failed: {error}"
        )
    if not apart:
        return None
    return f"a trial of it gave other logits (relative difference {apart:.2g})"


def _alone(model: PreTrainedModel, ids: Tensor, further: int = 0) -> Tensor:
    """(1, T) -> (V,) logits after the last token, from the model's own attention and cache.

    The last token is ``further`` positions on. A cache is used because, in some versions of transformers, layers share
    keys and values only through it.
    """
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    places[:, -1] += further
    cache = Cache(layers=stock_layers(model.config.get_text_config(decoder=True)))
    logits: Tensor = model(
        input_ids=ids, position_ids=places, use_cache=True, **{CACHE: cache}
    ).logits
    return logits[0, -1].float()


def _packed(
    model: PreTrainedModel,
    cache: ModelKVCache,
    rows: list[list[int]],
    new: list[int],
    places: list[int],
    lenders: Collection[int],
) -> list[Tensor]:
    """Runs the next ``new[b]`` tokens of each row through the cache; (V,) logits after the last of each."""
    held = cache.row_lengths
    layout = RightPadded(held, new, cache[0].device)
    ids = torch.full((len(rows), layout.tokens), rows[0][0], device="cpu")
    for b, (row, first, count) in enumerate(zip(rows, held, new, strict=True)):
        ids[b, :count] = torch.tensor(row[first : first + count], device="cpu")
    logits = model(
        input_ids=ids.to(layout.device), position_ids=layout.position_ids, use_cache=True,
        **{CACHE: StepCache(cache, layout, places, lenders)},
    ).logits  # fmt: skip
    return [logits[b, count - 1].float() for b, count in enumerate(new)]


@torch.no_grad()
def dequantizations(model: PreTrainedModel) -> int:
    """How many times a prompt and a decode step, with the model's current attention, dequantize its cache.

    Raises TypeError if the model has layers that are not packed.
    """
    config = model.config.get_text_config(decoder=True)
    common = Common(type(model).__name__, CacheSettings.of("fp32"), config)
    cache = PackedCache(layers=packed_layers(common, CarambaLayer))
    if not all(type(layer) is CarambaLayer for layer in cache.layers):
        raise TypeError(
            f"{type(model).__name__} has layers of other kinds than attention; use CarambaCache"
        )
    embeddings: Any = model.get_input_embeddings()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=embeddings.weight.device)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    with warnings.catch_warnings(), evaluating(model):
        warnings.simplefilter("ignore")
        for places in (torch.arange(2, device=ids.device), torch.arange(2, 3, device=ids.device)):
            given = {}
            # Without position ids vision models reuse those of their last generate(), of any batch size.
            if takes_positions:
                given["position_ids"] = places[None]
            part = ids[:, : len(places)]
            model(input_ids=part, use_cache=True, **{CACHE: cache}, **given)
    return common.dequantized
