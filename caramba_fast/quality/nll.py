"""What a cache costs: the model's loss and predictions through it, against an fp16 cache.

Text is teacher-forced with ``prefill="stored"``, so that every token attends to what the cache
returns, exactly as it would while decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import KVCacheKind, cache_configs, kind_names
from caramba_fast.models import LanguageModel

CHUNK = 256


@dataclass(frozen=True)
class CacheQuality:
    """Figures of one cache kind on one text.

    Attributes:
        kind: cache kind.
        tokens: predictions measured.
        nll: mean negative log likelihood, nats per token.
        delta_nll: nll minus the baseline's.
        ppl_ratio: exp(delta_nll).
        mean_kl: mean KL(baseline ‖ candidate) of the next-token distributions, nats.
        top1_agreement: share of positions where both rank the same token first.
        bytes_per_token: bytes one cached token takes.
    """

    kind: str
    tokens: int
    nll: float
    delta_nll: float
    ppl_ratio: float
    mean_kl: float
    top1_agreement: float
    bytes_per_token: float


@torch.no_grad()
def chunked_log_probs(
    model: LanguageModel,
    ids: Tensor,
    configs: dict[str, Any],
    chunk: int = CHUNK,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Next-token log probabilities of teacher-forced text, ``chunk`` positions at a time.

    Args:
        model: the model, on ids' device.
        ids: (B, T) token ids, T of 2 or more.
        configs: how each stream is stored (`caramba_fast.config.cache_configs`).
        chunk: positions computed at a time; the figures do not depend on it.

    Yields:
        log probabilities (B, t, V) float32 and the tokens (B, t) they are to predict.
    """
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; (B, T) with T >= 2 is needed")
    length = ids.shape[1] - 1
    cache = ModelKVCache(
        model.cache_layout, ids.shape[0], length, device=ids.device, prefill="stored", **configs
    )
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        logits = model.forward(ids[:, start:stop], cache)
        yield F.log_softmax(logits.to(torch.float32), dim=-1), ids[:, start + 1 : stop + 1]


@torch.no_grad()
def compare_caches(
    model: LanguageModel,
    ids: Tensor,
    kinds: Sequence[KVCacheKind | str],
    *,
    baseline: KVCacheKind | str = KVCacheKind.FP16,
    qblock: int = 32,
) -> list[CacheQuality]:
    """Measures each kind against the baseline on the same tokens, all caches in step.

    Args:
        model: the model.
        ids: (B, T) token ids of real text.
        kinds: cache kinds to measure; "q8/q4" stores K and V differently.
        baseline: the kind to compare with.
        qblock: values that share a scale.

    Returns:
        one `CacheQuality` a kind, in order.
    """
    stores = [cache_configs(kind, qblock=qblock) for kind in (baseline, *kinds)]
    runs = [chunked_log_probs(model, ids, configs) for configs in stores]
    sums = torch.zeros(len(runs), 3, dtype=torch.float64)
    count = 0
    for parts in zip(*runs, strict=True):
        reference, targets = parts[0]
        count += targets.numel()
        for index, (candidate, _) in enumerate(parts):
            nll = -candidate.gather(-1, targets[..., None]).sum()
            kl = F.kl_div(candidate, reference, reduction="sum", log_target=True)
            same = (candidate.argmax(-1) == reference.argmax(-1)).sum()
            sums[index] += torch.stack((nll, kl, same)).double().cpu()
    means = sums / count
    return [
        _row(
            model,
            "/".join(kind_names(kind)),
            stores[index],
            means[index],
            float(means[0, 0]),
            count,
        )
        for index, kind in enumerate(kinds, start=1)
    ]


def _row(
    model: LanguageModel,
    name: str,
    configs: dict[str, Any],
    means: Tensor,
    base_nll: float,
    count: int,
) -> CacheQuality:
    nll, kl, same = means.tolist()
    return CacheQuality(
        kind=name,
        tokens=count,
        nll=nll,
        delta_nll=nll - base_nll,
        ppl_ratio=math.exp(nll - base_nll),
        mean_kl=kl,
        top1_agreement=same,
        bytes_per_token=ModelKVCache(
            model.cache_layout, 1, 128, device="meta", **configs
        ).bytes_per_token,
    )
