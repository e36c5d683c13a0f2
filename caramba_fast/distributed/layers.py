"""Spread caches of standard (K, V) and of decoupled attention (K_sem, K_geo, V)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from caramba_fast.distributed.layer import ContextParallelLayer


class ContextParallelLayerKVCache(ContextParallelLayer):
    """K and V of one layer; as `caramba_fast.cache.LayerKVCache` but for `ALLOWED` options."""

    def append(
        self,
        k: Tensor,
        v: Tensor,
        new_lens: Sequence[int] | None = None,
        cache_leftpad: Tensor | None = None,
        *,
        will_attend: bool = True,
    ) -> None:
        """Stores those of T new tokens a row that go to this rank; as `LayerKVCache.append`.

        Args:
            k, v: (B, H_kv, T, D) or flat (B, T, dim), the same on every rank.
            cache_leftpad: None; anything else is refused.

        Raises:
            ValueError, TypeError: as there, the same on every rank and before anything is written.
        """
        self._append({"k": k, "v": v}, new_lens, cache_leftpad, will_attend)

    def attend(self, q: Tensor, *, before: int = 0, **options: Any) -> Any:
        """Attention of the T newest tokens over what all ranks hold, the same bits on every rank.

        Args:
            q: (B, H_q, T, D_k), the same on every rank.
            before: how many of the newest tokens of every row come after these T.
            options: softmax_scale, window_size, softcap, s_aux, null_k, null_v, num_splits, q_chunk.

        Raises:
            ValueError, TypeError: as `LayerKVCache.attend`, and options not named here.
            RankLostError: a rank is gone.
        """
        return self._attend(q, before=before, **options)


class ContextParallelDecoupledLayerKVCache(ContextParallelLayer):
    """K_sem, K_geo and V of one layer; as `caramba_fast.cache.DecoupledLayerKVCache`."""

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
        """Stores those of T new tokens a row that go to this rank; as `ContextParallelLayerKVCache.append`."""
        new = {"k_sem": k_sem, "k_geo": k_geo, "v": v}
        self._append(new, new_lens, cache_leftpad, will_attend)

    def attend(self, q_sem: Tensor, q_geo: Tensor, **options: Any) -> Any:
        """Attention of the T newest tokens over what all ranks hold.

        Args:
            q_sem, q_geo: (B, H_q, T, D) each, the same on every rank.
            options: sem_scale, geo_scale and those of `ContextParallelLayerKVCache.attend`.
        """
        return self._attend(q_sem, q_geo, **options)
