"""Whether our attention can read a model's layers as they are stored, found by trying it.

Configs do not say what a model's code does with keys and values between its cache and its attention. Two small
passes through a packed cache do: rows of different lengths, a prompt and a chunk behind it. They must ask for no
tensors, and say of every row what the model says of it alone.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.config import KVCacheKind, KVCacheTensorConfig
from caramba_fast.hf.capabilities import MOST_PADDING_ERROR, Findings, evaluating
from caramba_fast.hf.compat import is_chunked, stock_layers
from caramba_fast.hf.layers import StepCache, TensorsNeededError
from caramba_fast.hf.row_layout import EndFrame
from caramba_fast.hf.scope import decoder_configs, our_attention

#: Tokens of the two rows of each pass of the trial.
TRIAL = ([3, 5], [1, 2])


#: Why a model that is compiled already is read as tensors.
COMPILED = (
    "its forward is compiled by torch.compile, which cannot read layers as they are stored: give us the model as it "
    "was before"
)


@dataclass(frozen=True)
class Reading:
    """How a model's layers are read.

    Attributes:
        configs: those whose attention has to be ours.
        reason: why they are not read as they are stored; None if they are.
        chunks: layers that attend within chunks: their index and tokens of a chunk.
    """

    configs: list[Any]
    reason: str | None
    chunks: dict[int, int]


_FOUND: WeakKeyDictionary[PreTrainedModel, tuple[Findings, Reading]] = WeakKeyDictionary()


def reading(model: PreTrainedModel, findings: Findings) -> Reading:
    """`Reading` of a model, remembered as long as its findings are the same; the first time it is tried out."""
    known = _FOUND.get(model)
    if known is None or known[0] is not findings:
        configs = decoder_configs(model)
        reason = _plain_reason(model, configs, findings) or _trial(model, configs, findings)
        known = _FOUND[model] = (findings, Reading(configs, reason, chunks_of(model)))
    return known[1]


def chunks_of(model: PreTrainedModel) -> dict[int, int]:
    """Which layers attend within chunks, and how long those are."""
    config = model.config.get_text_config(decoder=True)
    return {
        index: int(layer.sliding_window)
        for index, layer in enumerate(stock_layers(config))
        if getattr(layer, "sliding_window", None) is not None and is_chunked(config, index)
    }


def _plain_reason(model: PreTrainedModel, configs: list[Any], findings: Findings) -> str | None:
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
    if not all(isinstance(shape, LayerShape) for shape in findings.shapes):
        return "its layers store something else than K and V"
    return None


def is_compiled(model: PreTrainedModel) -> bool:
    """Whether a call of the model runs what ``torch.compile`` made of it."""
    whole = getattr(model, "_compiled_call_impl", None) is not None
    return whole or hasattr(model.forward, "_torchdynamo_orig_callable")


@torch.no_grad()
def _trial(model: PreTrainedModel, configs: list[Any], findings: Findings) -> str | None:
    """Why packed reads do not work, from two passes; None if they do."""
    embeddings: Any = model.get_input_embeddings()
    device, most = embeddings.weight.device, len(embeddings.weight)
    rows = [
        [(11 + 7 * i + 3 * b) % most for i in range(n + m)]
        for b, (n, m) in enumerate(zip(*TRIAL, strict=True))
    ]
    plain = KVCacheTensorConfig(kind=KVCacheKind.FP32)
    cache = ModelKVCache(findings.shapes, len(rows), 64, plain, plain, device, prefill="stored")
    try:
        with evaluating(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = [_alone(model, torch.tensor([row], device=device)) for row in rows]
            for new in TRIAL:
                found = _packed(model, configs, findings, cache, rows, new)
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
    apart = max(
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(found, wanted, strict=True)
    )
    if apart <= MOST_PADDING_ERROR:
        return None
    return f"a trial of it gave other logits (relative difference {apart:.2g})"


def _alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """(1, T) -> (V,) logits behind the last token, by the model's own attention and cache.

    With a cache: models whose layers share keys and values do so only there in some transformers.
    """
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    cache = Cache(layers=stock_layers(model.config.get_text_config(decoder=True)))
    logits: Tensor = model(
        input_ids=ids, position_ids=places, past_key_values=cache, use_cache=True
    ).logits
    return logits[0, -1].float()


def _packed(
    model: PreTrainedModel,
    configs: list[Any],
    findings: Findings,
    cache: ModelKVCache,
    rows: list[list[int]],
    new: list[int],
) -> list[Tensor]:
    """The next ``new[b]`` tokens of each row through the cache; (V,) logits behind the last of each."""
    held = cache.row_lengths
    frame = EndFrame(held, new, cache[0].device)
    ids = torch.full((len(rows), frame.tokens), rows[0][0])
    for b, (row, first, count) in enumerate(zip(rows, held, new, strict=True)):
        ids[b, :count] = torch.tensor(row[first : first + count])
    with our_attention(configs):
        logits = model(
            input_ids=ids.to(frame.device), position_ids=frame.position_ids, use_cache=True,
            past_key_values=StepCache(cache, frame, findings),
        ).logits  # fmt: skip
    return [logits[b, count - 1].float() for b, count in enumerate(new)]
