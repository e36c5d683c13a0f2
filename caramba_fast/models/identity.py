"""Identity of a model: a digest of its weights and of the settings that its caches depend on."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from caramba_fast.models.packed import PackedWeight

#: Settings that do not change what is cached: origin, dtype, output, token ids.
UNRELATED = frozenset((
    "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "initializer_range",
))  # fmt: skip


def model_digest(model: Any) -> str:
    """64 hex digits that differ between models whose caches differ.

    SHA-256 of every weight with its name, shape and dtype, of the model's configuration (RoPE, windows, norms), and of
    the active adapters. It takes about half a second per gigabyte and core.

    Raises:
        TypeError: the model has no weights, or is one of several ranks that share them.
    """
    reason = getattr(model, "why_not_saved", None)
    if reason:
        raise TypeError(f"{type(model).__name__} cannot be told from another: {reason}")
    modules = list(modules_of(model))
    named = [(n, x) for m in modules for n, x in m.state_dict().items() if isinstance(x, Tensor)]
    if not named:
        raise TypeError(
            f"{type(model).__name__} cannot be told from another: it has no weights, as a torch.nn.Module has them"
        )
    # Tied weights are one tensor under two names, and are read once.
    distinct = {_identity(x): x for _, x in named}
    with ThreadPoolExecutor(max(1, torch.get_num_threads())) as pool:
        values = dict(zip(distinct, pool.map(_values, distinct.values()), strict=True))
    found = hashlib.sha256()
    for name, x in named:
        found.update(f"{name} {tuple(x.shape)} {x.dtype} {values[_identity(x)]}\n".encode())
    found.update(settings_of(model).encode())
    return found.hexdigest()


def settings_of(model: object) -> str:
    """The configurations of a model and its modules, as far as caches depend on them, and the active adapters."""
    modules = list(modules_of(model))
    children = [child for module in modules for child in module.children()]
    parts = (model, *modules, *children)
    said = [json.dumps(_settings(part), sort_keys=True, default=_said) for part in parts]
    named = ((n, adapter_state(m)) for module in modules for n, m in module.named_modules())
    return "".join((*said, *(f"\n{name} {state}" for name, state in named if state is not None)))


def modules_of(model: object) -> Iterable[nn.Module]:
    """The model, or the modules that an adapter around one holds."""
    if isinstance(model, nn.Module):
        return [model]
    return [x for x in getattr(model, "__dict__", {}).values() if isinstance(x, nn.Module)]


def adapter_state(module: nn.Module) -> tuple[Any, ...] | None:
    """Active adapters of a layer and their scales, as in peft, which no tensor shows; None without adapters."""
    active = getattr(module, "_active_adapter", None)
    if active is None:
        return None
    merged, scaling = getattr(module, "merged_adapters", ()), getattr(module, "scaling", None)
    return (
        [active] if isinstance(active, str) else list(active),
        bool(getattr(module, "_disable_adapters", False)),
        tuple(merged),
        sorted(scaling.items()) if isinstance(scaling, dict) else [],
    )


class AdaptersInUse:
    """The active adapters of a model's layers at one time."""

    def __init__(self, model: object) -> None:
        self._layers = list(_layers_with_adapters(model))
        self._states = self._now()

    def same_as(self, other: AdaptersInUse) -> bool:
        """Whether both found the same layers in the same state."""
        layers = [list(map(id, found._layers)) for found in (self, other)]
        return layers[0] == layers[1] and self._states == other._states

    def _now(self) -> list[tuple[Any, ...] | None]:
        return list(map(adapter_state, self._layers))

    def unchanged(self) -> bool:
        """Whether these layers use the same adapters still; new layers are not looked for, which takes longer."""
        return not self._layers or self._now() == self._states


def _layers_with_adapters(model: object) -> Iterable[nn.Module]:
    """A plain loop, faster than `Module.modules`, since engines call it while requests wait."""
    name = "_active_adapter"
    kinds: dict[type, bool] = {}
    left: list[nn.Module | None] = [*modules_of(model)]
    while left:
        module = left.pop()
        if module is None:
            continue
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = hasattr(kind, name)
        if kinds[kind] or name in module.__dict__:
            yield module
        if module._modules:
            left.extend(module._modules.values())


def _said(value: object) -> str:
    """``str(value)`` without addresses, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _identity(x: Tensor) -> tuple[Any, ...]:
    # the data pointers of a tensor subclass may all be 0
    apart = isinstance(x, PackedWeight) or is_traceable_wrapper_subclass(x)
    pointer = id(x) if apart else x.data_ptr()
    return pointer, x.shape, x.stride(), x.dtype, x.device


def parts_of(x: Tensor) -> tuple[str, list[Tensor]]:
    """A tensor subclass, such as torchao's weights, as a description and its plain tensors; ("", [x]) of others."""
    if not is_traceable_wrapper_subclass(x):
        return "", [x]
    names, context = x.__tensor_flatten__()
    inner = [parts_of(getattr(x, name)) for name in names]
    said = "".join(f" {name}{part}" for name, (part, _) in zip(names, inner, strict=True))
    return f"{type(x).__name__} {_said(context)}{said}", [y for _, found in inner for y in found]


def _values(x: Tensor) -> str:
    said, parts = parts_of(x)
    if said:
        plain = (f"{tuple(y.shape)} {y.dtype} {_values(y)}" for y in parts)
        return hashlib.sha256("\n".join((said, *plain)).encode()).hexdigest()
    whole = x.detach().reshape(-1).contiguous().cpu()
    return hashlib.sha256(whole.view(torch.uint8).numpy().data).hexdigest()


def _settings(module: Any) -> Any:
    """The related settings of a module's configuration, and its own window."""
    config = getattr(module, "config", None)
    for name, options in (("model_dump", {"mode": "json"}), ("to_dict", {})):
        if callable(getattr(config, name, None)):
            return [
                _related(getattr(config, name)(**options)),
                getattr(module, "local_window", None),
            ]
    if is_dataclass(config) and not isinstance(config, type):
        return [_related(asdict(config)), getattr(module, "local_window", None)]
    if hasattr(config, "__dict__"):  # a namespace
        return [_related(vars(config)), getattr(module, "local_window", None)]
    return getattr(module, "local_window", None)


def _related(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {str(key): x for key, x in value.items() if str(key) not in UNRELATED}
        return {key: _related(x) for key, x in kept.items() if not key.startswith("_")}
    return value
