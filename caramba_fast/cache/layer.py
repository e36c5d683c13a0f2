"""Caches of one attention layer: standard (K, V) and decoupled (K_sem, K_geo, V)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba_fast.cache.base import LayerCache
from caramba_fast.cache.knowledge import Knowledge
from caramba_fast.cache.statistics import StreamStatistics
from caramba_fast.cache.tensor import CacheTensor
from caramba_fast.config import KVCacheTensorConfig, Rotary
from caramba_fast.ops import (
    append_,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    extend_attention,
)


class LayerKVCache(LayerCache):
    """K and V of one layer, each in any kind.

    Args:
        batch_size: rows.
        max_seq_len: tokens a row can hold.
        k_dim, v_dim: width of K and of V over all kv heads, ``n_kv_heads * head_dim`` each.
        k_cfg, v_cfg: how each is stored; by default fp16.
        device: where the buffers live.
        n_kv_heads: kv heads; both widths must be multiples of it.
        page_size, num_pages: a paged cache; see `LayerCache`.
        rope: RoPE of the keys, which configs with ``center`` or ``scale`` take into account.
        key_bias, calibration, constants_from_prompt: where their constants come from; see `Knowledge`.

    Raises:
        ValueError: a size that is not positive or does not divide, a block that does not fit.
    """

    k: CacheTensor
    v: CacheTensor
    _append_op = staticmethod(append_)
    _decode_op = staticmethod(decode_attention)
    _extend_op = staticmethod(extend_attention)

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_dim: int,
        v_dim: int,
        k_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        rope: Rotary | None = None,
        key_bias: StreamStatistics | None = None,
        calibration: dict[str, StreamStatistics] | None = None,
        constants_from_prompt: bool = True,
    ) -> None:
        dims = {"k": k_dim, "v": v_dim}
        configs = {"k": k_cfg or KVCacheTensorConfig(), "v": v_cfg or KVCacheTensorConfig()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            known=Knowledge(
                {} if rope is None else {"k": rope}, {} if key_bias is None else {"k": key_bias},
                calibration or {}, constants_from_prompt,
            ),
        )  # fmt: skip
        self._name_streams()

    def append(
        self,
        k: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
    ) -> None:
        """Quantizes and stores T tokens a row.

        Args:
            k: (B, H_kv, T, D_k), or flat (B, T, k_dim); float32, float16 or bfloat16.
            v: (B, H_kv, T, D_v), or flat (B, T, v_dim).
            new_lens: of the T tokens of row b the first ``new_lens[b]`` count, the rest is padding and
                is not stored; by default all count.
            cache_leftpad: (B,) int32, leading slots that hold padding (transforms count from there).
            will_attend: whether `attend` follows with the queries of all T tokens. With a tail, more than
                tail_slack of them need memory until then; False saves it.

        Raises:
            ValueError: a wrong shape, or a row that would exceed max_seq_len.
            OutOfPagesError: the pool of a paged cache is too small.
            TypeError: a wrong dtype. The cache is unchanged in every case.
        """
        self._append({"k": k, "v": v}, new_lens, cache_leftpad, will_attend)

    def attend(self, q: Tensor, *, before: int = 0, **options: Any) -> Any:
        """Attention of the T newest tokens over everything cached, as `ops.decode_attention`.

        Args:
            q: (B, H_q, T, D_k), queries of the T tokens appended last; more than 32 go through
                `ops.extend_attention`.
            before: how many of the newest tokens of every row come after these T; they are not seen.
            options: softmax_scale, window_size, softcap, … of `ops.decode_attention`.

        Raises:
            ValueError: more queries than tokens cached, or an option that does not fit.
        """
        return self._attend(q, before=before, **options)


class DecoupledLayerKVCache(LayerCache):
    """K_sem, K_geo and V of one layer of decoupled attention, each in any kind.

    Args:
        batch_size, max_seq_len, device, n_kv_heads, page_size, num_pages: as in `LayerKVCache`.
        k_sem_dim, k_geo_dim, v_dim: widths over all kv heads.
        k_sem_cfg, k_geo_cfg, v_cfg: how each is stored; by default fp16.
        rope: RoPE of the geometric keys.
        calibration, constants_from_prompt: where the constants of ``center`` and ``scale`` come from; see
            `caramba_fast.cache.knowledge.Knowledge`.

    Raises:
        ValueError: as in `LayerKVCache`.
    """

    k_sem: CacheTensor
    k_geo: CacheTensor
    v: CacheTensor
    _append_op = staticmethod(decoupled_append_)
    _decode_op = staticmethod(decoupled_decode_attention)
    _extend_op = staticmethod(decoupled_extend_attention)

    def __init__(
        self,
        batch_size: int,
        max_seq_len: int,
        k_sem_dim: int,
        k_geo_dim: int,
        v_dim: int,
        k_sem_cfg: KVCacheTensorConfig | None = None,
        k_geo_cfg: KVCacheTensorConfig | None = None,
        v_cfg: KVCacheTensorConfig | None = None,
        device: torch.device | str = "cpu",
        n_kv_heads: int = 1,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        rope: Rotary | None = None,
        calibration: dict[str, StreamStatistics] | None = None,
        constants_from_prompt: bool = True,
    ) -> None:
        dims = {"k_sem": k_sem_dim, "k_geo": k_geo_dim, "v": v_dim}
        given = {"k_sem": k_sem_cfg, "k_geo": k_geo_cfg, "v": v_cfg}
        configs = {name: config or KVCacheTensorConfig() for name, config in given.items()}
        super().__init__(
            batch_size, max_seq_len, dims, configs, device, n_kv_heads, page_size, num_pages,
            known=Knowledge(
                {} if rope is None else {"k_geo": rope}, {}, calibration or {}, constants_from_prompt
            ),
        )  # fmt: skip
        self._name_streams()

    def append(
        self,
        k_sem: Tensor,
        k_geo: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
    ) -> None:
        """Quantizes and stores T tokens a row: (B, H_kv, T, D) each, or flat (B, T, dim).

        Arguments and errors as in `LayerKVCache.append`.
        """
        new = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
        self._append(new, new_lens, cache_leftpad, will_attend)

    def attend(self, q_sem: Tensor, q_geo: Tensor, **options: Any) -> Any:
        """Attention of the T newest tokens, as `ops.decoupled_decode_attention`.

        Args:
            q_sem: (B, H_q, T, D_sem); q_geo: (B, H_q, T, D_geo).
            options: sem_scale, geo_scale, window_size, … of the op.
        """
        return self._attend(q_sem, q_geo, **options)
