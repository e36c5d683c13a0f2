"""A language model over several ranks: its caches spread by tokens, or its weights by heads, or both.

`context_parallel` gives a model caches whose tokens are on all ranks. `tensor_parallel` gives every rank some heads of
the native Transformer, and caches of those alone: weights are split by `torch.distributed.tensor.parallel` in the way
of Megatron-LM (arXiv:1909.08053), projections into heads and into the MLP by columns, those out of them by rows, so
that each block has two all-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from caramba_fast.cache import (
    AnyLayerShape,
    DecoupledLayerShape,
    LayerShape,
    ModelKVCache,
)
from caramba_fast.distributed.cache import Context, spread_layout
from caramba_fast.distributed.group import RankGroup
from caramba_fast.distributed.placement import PAGE_SIZE

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class ParallelModel:
    """A `LanguageModel` that is another one with caches of another layout; every rank runs one.

    Args:
        model: a language model.
        layout: what each layer caches on this rank.
        group: the ranks.
    """

    #: Steps decide on the host where a token goes, and collectives go through the host.
    why_not_recorded = "the model runs on several ranks"
    #: A choice by measurement is one by the clock of each rank.
    why_not_chosen = "the model runs on several ranks, which may measure and choose differently"
    #: No rank has all weights, or the whole cache.
    why_not_saved = (
        "the model runs on several ranks, and each has a part of its weights or of its cache"
    )

    def __init__(self, model: Any, layout: Sequence[AnyLayerShape], group: RankGroup) -> None:
        self.model, self.group, self._layout = model, group, list(layout)

    @property
    def eos_token_id(self) -> int | None:
        """As the model's, like all that follow."""
        return self.model.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids, where the model knows several."""
        eos = self.eos_token_id
        return getattr(self.model, "eos_token_ids", () if eos is None else (eos,))

    @property
    def pad_token_id(self) -> int | None:
        """Padding id, or None."""
        return self.model.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def device(self) -> torch.device:
        """Where token ids have to be."""
        return self.model.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer caches on this rank."""
        return list(self._layout)

    def forward(
        self, query_token_ids: Tensor, kv_cache: ModelKVCache | None = None, **options: Any
    ) -> Tensor:
        """The model's logits, the same on every rank; arguments as in `LanguageModel.forward`.

        Raises:
            RankLostError: a rank is gone; it is named.
        """
        with self.group.guarded():
            logits: Tensor = self.model.forward(query_token_ids, kv_cache, **options)
        return logits

    __call__ = forward


def context_parallel(
    model: Any,
    group: RankGroup,
    *,
    page_size: int = PAGE_SIZE,
    rank_tokens: Sequence[int] | None = None,
) -> ParallelModel:
    """The model with caches whose tokens are spread over ranks: ``Generator(context_parallel(model, group))``.

    Every rank has the whole model and runs the same; with the same seed all draw the same tokens. What ends a run by
    the clock (``max_time``) or chooses by it (``cache="auto"``) may differ between ranks and is to be left out.

    Args:
        model: a `LanguageModel`, such as the native Transformer, also after `tensor_parallel` over other ranks.
        group: the ranks.
        page_size, rank_tokens: as in `Context`.

    Raises:
        ValueError: a page size or counts that are not allowed.
    """
    context = Context(group, page_size, rank_tokens)
    return ParallelModel(model, spread_layout(model.cache_layout, context), group)


COLUMNS = {
    "self_attn": (
        "q_proj",
        "k_proj",
        "v_proj",
        "q_sem_proj",
        "k_sem_proj",
        "q_geo_proj",
        "k_geo_proj",
    ),
    "mlp": ("gate_proj", "up_proj"),
}
ROWS = {"self_attn": ("o_proj",), "mlp": ("down_proj",)}
NULLS = ("null_k_sem", "null_k_geo", "null_v")


def tensor_parallel(model: Any, group: RankGroup) -> ParallelModel:
    """Splits the heads and the MLPs of a native Transformer over ranks, in place.

    Every rank has loaded the same weights and keeps its part; embeddings and the output layer stay whole. Caches
    made from the result's ``cache_layout`` hold this rank's kv heads.

    Args:
        model: `caramba_fast.models.Transformer`, standard or decoupled.
        group: the ranks.

    Returns:
        the model as a `LanguageModel`, whose logits are the same on every rank.

    Raises:
        TypeError: the model is no native Transformer.
        ValueError: kv heads or the MLP's width do not divide by the number of ranks, or it is split already.
    """
    whole, blocks = _checked(model, group.size)
    layout = [own_heads(shape, group) for shape in whole]
    if group.size > 1:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - heavy, and only here
        from torch.distributed.tensor.parallel import parallelize_module  # noqa: PLC0415

        mesh = DeviceMesh.from_group(group.process_group, model.device.type)
        for block in blocks:
            parallelize_module(block, mesh, _plan(block), src_data_rank=None)
            _keep_own_heads(block.self_attn, group)
            block.split_over = group.size
    return ParallelModel(model, layout, group)


def _checked(model: Any, size: int) -> tuple[list[AnyLayerShape], Sequence[Any]]:
    """The model's whole layout and its blocks, once it is known that they can be split."""
    blocks = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(type(model), "cache_layout"):
        raise TypeError(
            f"model is a {type(model).__name__}; tensor parallelism is for caramba_fast.models.Transformer"
        )
    found: Any = blocks
    if hasattr(model, "split_projections"):  # whatever loaded it has merged them
        model.split_projections()
    if any(hasattr(block, "split_over") for block in found):
        raise ValueError(
            "the model is split over ranks already; load it again to split it otherwise"
        )
    heads, width = found[0].self_attn.n_kv_heads, found[0].mlp.gate_proj.out_features
    if heads % size:
        raise ValueError(
            f"the model has {heads} kv heads, which do not divide by {size} ranks; allowed are "
            f"{', '.join(str(n) for n in range(1, heads + 1) if heads % n == 0)} ranks"
        )
    if width % size:
        raise ValueError(f"the MLP's width of {width} does not divide by {size} ranks")
    return model.cache_layout, found


def _plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """How each projection of a block is split."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # noqa: PLC0415

    plan: dict[str, ParallelStyle] = {}
    for names, style in ((COLUMNS, ColwiseParallel), (ROWS, RowwiseParallel)):
        for part, projections in names.items():
            module = block.get_submodule(part)
            plan |= {f"{part}.{name}": style() for name in projections if hasattr(module, name)}
    return plan


def _keep_own_heads(attention: Any, group: RankGroup) -> None:
    """The attention works on this rank's heads from now on."""
    for name in NULLS:
        whole = getattr(attention, name, None)
        if whole is not None:
            own = nn.Parameter(_own(whole.detach(), group), requires_grad=whole.requires_grad)
            setattr(attention, name, own)
    attention.n_heads //= group.size
    attention.n_kv_heads //= group.size


def _own(x: Tensor, group: RankGroup) -> Tensor:
    """This rank's heads of x (H_kv, ...)."""
    return x.chunk(group.size)[group.rank].clone()


def own_heads(shape: AnyLayerShape, group: RankGroup) -> AnyLayerShape:
    """What a layer caches of this rank's heads."""
    size, known = group.size, shape.query_rms
    if known is not None and size > 1:  # asked before the model is split
        rms = {name: _own(x, group) for name, x in known().items()}
        shape = replace(shape, query_rms=lambda: rms)
    if isinstance(shape, DecoupledLayerShape):
        widths = {
            name: getattr(shape, name) // size for name in ("k_sem_dim", "k_geo_dim", "v_dim")
        }
        return replace(shape, **widths, n_kv_heads=shape.n_kv_heads // size)
    assert isinstance(shape, LayerShape)
    return replace(
        shape,
        k_dim=shape.k_dim // size,
        v_dim=shape.v_dim // size,
        n_kv_heads=shape.n_kv_heads // size,
    )
