"""What a model cannot do, said before it would be silently wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from caramba_fast.hf.compat import is_hybrid, keeps_only_tokens, stock_layers

ALLOWED = (
    "decoder-only causal language models that keep keys and values in a transformers Cache are"
)
#: Relative difference padding may make to logits; a position too many makes more.
MOST_PADDING_ERROR = 0.05

T = TypeVar("T")


class PerModel(Generic[T]):
    """What was found of each model by trying it, kept while it lives and its embeddings keep their sizes."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[PreTrainedModel, tuple[list[Any], T]] = WeakKeyDictionary()

    def of(self, model: PreTrainedModel, find: Callable[[PreTrainedModel], T]) -> T:
        """What ``find`` found, the first time or again."""
        ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
        sizes = [None if end is None else end.weight.shape for end in ends]
        known = self._found.get(model)
        if known is None or known[0] != sizes:
            known = self._found[model] = (sizes, find(model))
        return known[1]


_PADDING_ERROR = PerModel[float]()


def check_servable(model: Any) -> None:
    """Raises TypeError with the reason where our caches cannot serve ``model`` through the adapter."""
    reason = _reason(model)
    if reason is None and getattr(model, "_is_stateful", False):
        reason = "its state is not (only) keys and values of tokens (it is recurrent or hybrid)"
    _refuse(model, reason)


def check_cacheable(model: Any) -> None:
    """Raises TypeError with the reason where ``model`` has no use for a `CarambaCache`."""
    reason = _reason(model)
    if reason is None:
        layers = (
            stock_layers(model.config.get_text_config(decoder=True))
            if model._supports_default_dynamic_cache()
            else []
        )
        if not any(keeps_only_tokens(layer) or is_hybrid(layer) for layer in layers):
            kinds = (
                ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no DynamicCache"
            )
            reason = (
                "none of its layers keeps keys and values of tokens alone (it is recurrent, or brings its own cache: "
                f"{kinds}), so nothing could be packed"
            )
    _refuse(model, reason)


def _reason(model: Any) -> str | None:
    if not isinstance(model, PreTrainedModel):
        inner = _wrapped(model)
        hint = f": give us the model inside, {inner}" if inner else ""
        return f"it is no transformers PreTrainedModel{hint}"
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(model.config, "add_cross_attention", False):
        return "it has cross-attention (add_cross_attention)"
    if not model.can_generate():
        return "it has no language-model head, so it cannot generate"
    if model.get_input_embeddings().weight.is_meta:
        return "its weights are on the meta device: load them first"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "its forward takes no past_key_values: it keeps no keys and values"
    return None


def _wrapped(model: Any) -> str | None:
    """How to get at the transformers model that ``model`` wraps; None if it wraps none."""
    if isinstance(getattr(model, "_orig_mod", None), PreTrainedModel):
        return "model._orig_mod, and compile it afterwards"
    get = getattr(model, "get_base_model", None)
    if callable(get) and isinstance(get(), PreTrainedModel):
        return "model.get_base_model() (adapters stay in it, and PeftModel.generate uses it)"
    if isinstance(getattr(model, "module", None), PreTrainedModel):
        return "model.module"
    return None


def _refuse(model: Any, reason: str | None) -> None:
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be served: {reason}; {ALLOWED} supported")


def check_padding(model: PreTrainedModel) -> None:
    """Raises ValueError where padding in front of a row changes what the model says of it.

    Some decoders count positions over padding, whatever mask and position ids say: ragged batches would be
    silently wrong. Two small forward passes, once while the model lives.
    """
    if _PADDING_ERROR.of(model, _padding_error) > MOST_PADDING_ERROR:
        raise ValueError(
            f"{type(model).__name__} cannot take rows of different lengths at once: its positions count "
            "padding; give it one row at a time, or rows of equal length"
        )


@torch.no_grad()
def _padding_error(model: PreTrainedModel) -> float:
    embeddings: Any = model.get_input_embeddings()
    device, most = embeddings.weight.device, len(embeddings.weight)
    ids = torch.tensor([[i % most for i in (0, 0, 7, 11, 13)]], device=device)
    mask = torch.tensor([[0, 0, 1, 1, 1]], device=device)
    places = torch.tensor([[0, 0, 0, 1, 2]], device=device)
    takes = "position_ids" in inspect.signature(model.forward).parameters

    def last_logits(start: int) -> Tensor:
        options = {"position_ids": places[:, start:]} if takes else {}
        out = model(
            input_ids=ids[:, start:], attention_mask=mask[:, start:], use_cache=False, **options
        )
        return out.logits[:, -1].float()

    with evaluating(model):
        padded, alone = last_logits(0), last_logits(2)
    return float((padded - alone).norm() / alone.norm().clamp(min=1e-30))


def max_positions(model: PreTrainedModel) -> int | None:
    """The length of a table of positions (learned, or GPT-J's angles): beyond it there is none to read."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int):
        return None
    tokens = model.get_input_embeddings()
    for module in model.modules():
        table = module.weight if isinstance(module, nn.Embedding) and module is not tokens else None
        if table is None:
            table = getattr(module, "embed_positions", None)
        if isinstance(table, Tensor) and 0 <= len(table) - longest <= 2:  # OPT keeps two in front
            return longest
    return None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and as it is written where it is compiled; leaves every module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
