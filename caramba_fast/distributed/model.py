"""A language model over several ranks: context parallelism, tensor parallelism, or both.

`context_parallel` spreads the tokens of the caches over the ranks. `tensor_parallel` gives every rank some heads of the
native Transformer and their caches, with weights split as in Megatron-LM (arXiv:1909.08053): input projections of
attention and MLP by columns, output projections by rows, so that each block has two all-reduces.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
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
from caramba_fast.distributed.heartbeat import RankLostError
from caramba_fast.distributed.placement import PAGE_SIZE

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class ParallelModel:
    """Wraps a `LanguageModel` and replaces its cache layout by what each layer caches on this rank."""

    #: Steps choose a token's rank on the host, and collectives go through the host.
    why_not_recorded = "the model runs on several ranks"
    #: ``cache="auto"`` chooses by measured times, which differ between ranks.
    why_not_chosen = "the model runs on several ranks, which may measure and choose differently"
    #: No rank has all weights, or the whole cache.
    why_not_saved = (
        "the model runs on several ranks, and each has a part of its weights or of its cache"
    )

    def __init__(self, model: Any, layout: Sequence[AnyLayerShape], group: RankGroup) -> None:
        self.model, self.group, self._layout = model, group, list(layout)

    @property
    def eos_token_id(self) -> int | None:
        """The model's eos_token_id."""
        return self.model.eos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids of the model."""
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
    def trained_positions(self) -> int | None:
        """Longest text, in tokens, that the model was trained for, if it says so."""
        return getattr(self.model, "trained_positions", None)

    @property
    def max_positions(self) -> int | None:
        """Most tokens of a row that the model can process, if it says so."""
        return getattr(self.model, "max_positions", None)

    @property
    def device(self) -> torch.device:
        """Device that token ids must be on."""
        return self.model.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """What each layer caches on this rank."""
        return list(self._layout)

    def largest_of_ranks(self, number: int) -> int:
        """The largest ``number`` that a rank gives; the same on every rank, so that all decide alike."""
        mine = getattr(self.model, "largest_of_ranks", int)(number)
        return int(self.group.gather_on_host(torch.tensor([mine], device="cpu")).max())

    def begin_together(self, call: Mapping[str, object]) -> None:
        """Waits until all ranks begin a call, and checks that ``call``, values by name, is the same on all of them.

        Raises:
            ValueError: the ranks were given different calls; on every rank.
            RankLostError: a rank is lost.
            RuntimeError: a rank did not begin one in time, for example since it is still within an earlier call.
        """
        try:
            different = self.differing(call)
        except RankLostError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "not all ranks have begun this call; each has to make the same calls, and to leave one early, also "
                "by an error, at the same step"
            ) from error
        if different:
            raise ValueError(
                f"ranks differ in {' and '.join(different)}; all have to make the same call, and without a seed their "
                "global generators need the same state"
            )

    def differing(self, call: Mapping[str, object]) -> list[str]:
        """Names of the items of ``call`` that differ between any ranks, those of a wrapped ParallelModel included."""
        within = self.model.differing(call) if isinstance(self.model, ParallelModel) else []
        digests = [hashlib.sha256(repr(item).encode()).digest()[:8] for item in call.items()]
        known = [name in within for name in call]
        mine = torch.tensor(
            [[*digest, differs] for digest, differs in zip(digests, known, strict=True)],
            dtype=torch.uint8, device="cpu",
        )  # fmt: skip
        found = self.group.gather_on_host(mine)
        same = ((found == found[0]).all(2) & (found[..., 8] == 0)).all(0).tolist()
        return [name for name, agrees in zip(call, same, strict=True) if not agrees]

    def forward(
        self, query_token_ids: Tensor, kv_cache: ModelKVCache | None = None, **options: Any
    ) -> Tensor:
        """The model's logits, the same on every rank; arguments as in `LanguageModel.forward`.

        Raises RankLostError, naming the rank, if one is lost; otherwise as `begin_together`.
        """
        held = None if kv_cache is None else kv_cache.row_lengths
        lens = options.get("query_lens")
        given = (query_token_ids.tolist(), None if lens is None else list(lens), held)
        self.begin_together({"the tokens": given})
        return self.forward_begun(query_token_ids, kv_cache, **options)

    def forward_begun(
        self, query_token_ids: Tensor, kv_cache: ModelKVCache | None = None, **options: Any
    ) -> Tensor:
        """`forward` within a call that all ranks have begun together: it does not wait for them before it computes."""
        within = self.model
        run = within.forward_begun if isinstance(within, ParallelModel) else within.forward
        with self.group.guarded():
            logits: Tensor = run(query_token_ids, kv_cache, **options)
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

    Every rank has the whole model and makes the same calls; with the same seed all sample the same tokens. Do not set
    ``max_time``: ranks may stop after different steps. ``cache="auto"`` is refused, since ranks may measure and choose
    differently.

    Args:
        model: a `LanguageModel`, such as the native Transformer; may already be split by `tensor_parallel` over other
            ranks.
        group, page_size, rank_tokens: as in `Context`.

    Raises:
        TypeError: a model of transformers (a model may say why not as ``why_not_spread``), or no `LanguageModel`.
        ValueError: a page size or counts that are not allowed.
    """
    reason, lacks = getattr(model, "why_not_spread", None), _what_lacks(model)
    if reason is not None or lacks:
        raise TypeError(
            f"{reason or f'model is a {type(model).__name__}'}; context parallelism is for LanguageModels such as "
            f"caramba_fast.models.Transformer, which caramba_fast.models.load gives for many checkpoints{lacks}"
        )
    context = Context(group, page_size, rank_tokens)
    return ParallelModel(model, spread_layout(model.cache_layout, context), group)


def _what_lacks(model: Any) -> str:
    """What ``model`` needs to be a `LanguageModel`, for the end of a message; empty for one."""
    called = getattr(model, "forward", model)
    if callable(called) and "ctx" in inspect.signature(called).parameters:
        return "; for model(tokens, ctx=...) give caramba_fast.models.ContextModel(model, ...)"
    missing = [part for part in NEEDED if not hasattr(model, part)]
    return f"; it lacks {', '.join(missing)}" if missing else ""


#: Parts of a `LanguageModel` that a `ParallelModel` passes on.
NEEDED = ("forward", "cache_layout", "vocab_size", "eos_token_id", "pad_token_id", "device")
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
    """Splits the heads and the MLPs of a native Transformer, standard or decoupled, over ranks, in place.

    Every rank must have loaded the same weights and keeps its part; embeddings and the output layer are not split.
    Caches built from the result's ``cache_layout`` hold this rank's kv heads.

    Returns:
        the model as a `LanguageModel`, whose logits are the same on every rank.

    Raises:
        TypeError: the model is not a native Transformer.
        ValueError: the kv heads or the MLP's width are not divisible by the number of ranks, or it is split already.
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
    """The model's whole layout and its blocks; raises if they cannot be split."""
    blocks = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(blocks, nn.ModuleList) or not hasattr(type(model), "cache_layout"):
        raise TypeError(
            f"model is a {type(model).__name__}; tensor parallelism is for caramba_fast.models.Transformer"
        )
    found: Any = blocks
    if hasattr(model, "split_projections"):  # the loader may have merged them
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
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel  # noqa: PLC0415

    plan: dict[str, ParallelStyle] = {}
    for names, style in ((COLUMNS, ColwiseParallel), (ROWS, RowwiseParallel)):
        for part, projections in names.items():
            module = block.get_submodule(part)
            plan |= {f"{part}.{name}": style() for name in projections if hasattr(module, name)}
    return plan


def _keep_own_heads(attention: Any, group: RankGroup) -> None:
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
    """The cache shape of this rank's heads of a layer."""
    size, known = group.size, shape.query_rms
    if known is not None and size > 1:  # evaluated before the model is split
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
