"""CarambaCache: a transformers cache whose attention layers are packed and read as they are stored.

What a stock layer of a hybrid model holds (linear attention, convolutions), as tensors and plain values.

Such layers keep a few tensors and flags about them as attributes, named differently from version to version: all of
them are taken as they are.

A `CarambaCache` as tensors and plain values, and back: safe under ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from caramba_fast.cache import LayerShape
from caramba_fast.config.files import shown
from caramba_fast.hf.capabilities import check_cacheable, probe
from caramba_fast.hf.compat import (
    is_chunked,
    is_hybrid,
    keeps_only_tokens,
    lenders,
    stock_layers,
)
from caramba_fast.hf.hybrid_layer import STATES, HybridLayer, hybrid
from caramba_fast.hf.layers import CarambaLayer, Common
from caramba_fast.hf.masks import expect_mask
from caramba_fast.hf.scope import decoder_configs
from caramba_fast.hf.settings import CacheArgument, CacheSettings

PLAIN = (bool, int, float, str, torch.dtype, type(None))

Place = torch.device | str | None


def state_of_stock(layer: Any) -> dict[str, Any]:
    """Copies of a layer's attributes, safe under ``torch.load(weights_only=True)``.

    Raises:
        ValueError: one is no tensor, number or name.
    """
    fields = {name: copied(value, name, layer, None) for name, value in vars(layer).items()}
    return {"stock": type(layer).__name__, "fields": fields}


def load_stock(layer: Any, state: dict[str, Any], device: Place) -> None:
    """Puts a state into a layer of the same class.

    Args:
        device: where tensors go; None for where they are.

    Raises:
        ValueError: the state of another class of layer, or of another version of it.
    """
    kind, fields = state.get("stock"), state.get("fields", {})
    if kind != type(layer).__name__ or set(fields) != set(vars(layer)):
        raise ValueError(
            f"the state has a {kind or 'packed layer'} of {', '.join(sorted(fields)) or 'keys and values'}; "
            f"this cache has a {type(layer).__name__} of {', '.join(sorted(vars(layer)))}"
        )
    for name, value in fields.items():
        setattr(layer, name, copied(value, name, layer, device))


def move_stock(layer: Any, device: torch.device | str) -> None:
    """Moves a layer's tensors to a device."""
    for name, value in vars(layer).items():
        setattr(layer, name, copied(value, name, layer, device))


def copied(value: Any, name: str, layer: Any, device: Place) -> Any:
    """A copy, on ``device`` where one is given."""
    if isinstance(value, Tensor):
        return value.clone() if device is None else value.to(device, copy=True)
    if isinstance(value, torch.device):
        return value if device is None else torch.device(device)
    if isinstance(value, dict):
        return {key: copied(x, name, layer, device) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(x, name, layer, device) for x in value)
    if isinstance(value, PLAIN):
        return value
    raise ValueError(
        f"{type(layer).__name__}.{name} is a {type(value).__name__}; a layer of tensors, numbers and names can be "
        "saved, loaded and moved"
    )


#: What a state says it is.
FORMAT = "caramba_fast.hf.cache.1"
#: What keys and values of a model may be computed in.
DTYPES = ("float32", "float16", "bfloat16", "float64")


def state_of(common: Common, layers: Sequence[Any]) -> dict[str, Any]:
    """The state of a cache: of our layers and, in a hybrid model, of the stock ones between them."""
    return {
        "format": FORMAT,
        "leftpad": common.leftpad,
        "layers": [
            _layer_state(layer) if isinstance(layer, CarambaLayer) else state_of_stock(layer)
            for layer in layers
        ],
    }


def _layer_state(layer: CarambaLayer) -> dict[str, Any]:
    if layer.store is None:
        return {}
    dtype = str(layer.dtype).removeprefix("torch.")
    state = {"dropped": layer.dropped, "dtype": dtype, "store": layer.store.state_dict()}
    if isinstance(layer, HybridLayer):
        state["states"] = {name: copied(getattr(layer, name), name, layer, None) for name in STATES}
    return state


def load_state(
    common: Common,
    layers: Sequence[Any],
    state: dict[str, Any],
    device: torch.device | str | None,
) -> None:
    """Puts a state into layers of the same sizes and storage.

    Raises:
        ValueError: a state of another format, number or kind of layers, or storage, or one that contradicts its own
            tensors; nothing has changed then.
    """
    _check(common, layers, state)
    made = []
    for layer, part in zip(layers, state["layers"], strict=True):
        scratch = copy.copy(layer)
        if isinstance(layer, CarambaLayer):
            _load_layer(scratch, part, device)
        else:
            load_stock(scratch, part, device)
        made.append(scratch)
    leftpad = state["leftpad"]
    # Whatever could fail has been done.
    for layer, scratch in zip(layers, made, strict=True):
        vars(layer).update(vars(scratch))
    common.leftpad = leftpad if leftpad is None or device is None else leftpad.to(device)


def _check(common: Common, layers: Sequence[Any], state: Any) -> None:
    """Raises ValueError for what cannot be the state of such a cache, before anything is made for it."""
    found = state.get("format") if isinstance(state, dict) else type(state).__name__
    if found != FORMAT:
        raise ValueError(f"the state has format {shown(found)}; {FORMAT!r} is needed")
    kept, leftpad = state.get("layers"), state.get("leftpad")
    if not isinstance(kept, list) or not all(isinstance(part, dict) for part in kept):
        raise ValueError("the state's layers are no list of dicts")
    if len(kept) != len(layers):
        raise ValueError(f"the state has {len(kept)} layers; {common.model} has {len(layers)}")
    rows = set()
    for layer, part in zip(layers, kept, strict=True):
        if not isinstance(layer, CarambaLayer):
            continue
        if "stock" in part:
            raise ValueError(
                f"layer {layer.index} of the state is a {shown(part['stock'])}; {common.model} has attention there"
            )
        if part:
            problem = _problem(layer, part)
            if problem:
                raise ValueError(f"layer {layer.index} of the state: {problem}")
            rows.add(part["store"]["batch_size"])
    if len(rows) > 1:
        raise ValueError(f"the state's layers have {', '.join(map(str, sorted(rows)))} rows")
    if leftpad is not None and not (
        isinstance(leftpad, Tensor) and leftpad.dtype == torch.int32 and {*leftpad.shape} == rows
    ):
        raise ValueError("the state's leftpad is no int32 tensor with a number for each row")


def _problem(layer: CarambaLayer, part: dict[str, Any]) -> str | None:
    """What makes a layer's state unusable; None if its store can be made, which checks the rest itself."""
    wanted = {"dropped", "dtype", "store"} | (
        {"states"} if isinstance(layer, HybridLayer) else set()
    )
    if part.keys() != wanted:
        return f"it has {shown(sorted(part))}; {', '.join(sorted(wanted))} are needed"
    if part["dtype"] not in DTYPES:
        return f"dtype is {shown(part['dtype'])}; {', '.join(DTYPES)} are known"
    if type(part["dropped"]) is not int or not 0 <= part["dropped"] < 2**31:
        return f"dropped is {shown(part['dropped'])}; a whole number from 0 on is needed"
    if "states" in wanted and set(part["states"]) != set(STATES):
        return f"states needs {', '.join(STATES)}"
    store = part["store"]
    streams = store.get("streams") if isinstance(store, dict) else None
    if not isinstance(streams, dict) or not {"k", "v"} <= streams.keys():
        return "its store has no streams k and v"
    sizes = [store.get("batch_size"), store.get("n_kv_heads")]
    for name in ("k", "v"):
        codes = streams[name].get("codes") if isinstance(streams[name], dict) else None
        if not isinstance(codes, Tensor) or codes.ndim != 4:
            return f"{name} has no codes (rows, lanes, tokens, bytes)"
        numbers = [*sizes, streams[name].get("head_dim")]
        if not all(type(x) is int and x > 0 for x in numbers):
            return f"rows, heads and head_dim of {name} are {shown(numbers)}; positive numbers are needed"
        # two values to a byte at most: nothing larger than the tensors is made
        if (
            numbers[0] != len(codes)
            or numbers[1] * numbers[2] > 2 * codes.shape[1] * codes.shape[3]
        ):
            return (
                f"rows, heads and head_dim of {name} are {numbers}, its codes {tuple(codes.shape)}"
            )
    return None


def _load_layer(
    layer: CarambaLayer, state: dict[str, Any], device: torch.device | str | None
) -> None:
    if not state:
        layer.store = None
        return
    store = state["store"]
    streams, dtype = store["streams"], getattr(torch, state["dtype"])
    place = device or streams["k"]["codes"].device
    lead = (store["batch_size"], store["n_kv_heads"], 0)
    layer.lazy_initialization(
        *(torch.empty(*lead, streams[s]["head_dim"], dtype=dtype, device=place) for s in ("k", "v"))
    )
    assert layer.store is not None
    layer.store.load_state_dict(store)
    layer.dropped = state["dropped"]
    if isinstance(layer, HybridLayer):
        for name in STATES:
            setattr(layer, name, copied(state["states"][name], name, layer, place))


class CarambaCache(Cache):
    """``past_key_values`` for a model of transformers.

    Full, sliding and chunked attention layers are packed; layers of other kinds (linear attention, convolutions)
    are those of a stock `DynamicCache`. Memory is allocated when the first tokens come, and grows where no
    ``max_seq_len`` is given; `reserve` makes room ahead.

    Args:
        model: the model it is for; it must use our attention (`accelerate`, or `register` and
            ``model.set_attn_implementation("caramba_fast")``), or every step dequantizes.
        cache: "q4", "q8/q4" (K/V), dict(k="q8", v="q4"), …
        max_seq_len: most tokens of a row, padding included; room for all of them is there from the start. More raise
            ValueError before anything is written. None for no limit.
        offloading: whether layers that are not attended to wait on the CPU.
        prefill, calibration, fields: as in `CacheSettings.of`.

    Raises:
        TypeError: a model that keeps no keys and values of its own, and why.
        ValueError: a kind or setting that does not exist.
    """

    layers: list[Any]

    def __init__(
        self,
        model: PreTrainedModel,
        cache: CacheArgument = "q4",
        *,
        max_seq_len: int | None = None,
        offloading: bool = False,
        **options: Any,
    ) -> None:
        if max_seq_len is not None and max_seq_len < 1:
            raise ValueError(f"max_seq_len is {max_seq_len}; 1 or more, or None for no limit")
        self._make(model, CacheSettings.of(cache, **options), max_seq_len, offloading)
        self.common.limit = max_seq_len

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None = None,
        offloading: bool = False,
    ) -> CarambaCache:
        """The same without a limit, from settings that are made already, with room for rows of ``room`` tokens."""
        made = cls.__new__(cls)
        made._make(model, settings, room, offloading)
        return made

    def _make(
        self,
        model: PreTrainedModel,
        settings: CacheSettings,
        room: int | None,
        offloading: bool,
    ) -> None:
        check_cacheable(model)
        config = model.config.get_text_config(decoder=True)
        self.common = Common(
            type(model).__name__, settings, config, bool(decoder_configs(model)), room
        )
        known: dict[int, LayerShape] = known_shapes(model) if settings.takes_constants else {}
        lending = lenders(config)
        super().__init__(
            layers=[
                self._layer(
                    layer, i, self.common, known.get(i), getattr(layer, "sliding_window", None),
                    is_chunked(config, i), i in lending,
                )
                for i, layer in enumerate(stock_layers(config))
            ]
        )  # fmt: skip
        self.offloads = offloading

    @staticmethod
    def _layer(stock: Any, *args: Any) -> Any:
        """What takes the place of a stock layer: itself, where it keeps no K and V."""
        if keeps_only_tokens(stock):
            return CarambaLayer(*args)
        return hybrid(stock, *args) if is_hybrid(stock) else stock

    # -- what transformers calls --------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores keys and values of a layer; see `CarambaLayer.update`."""
        if self.offloads:
            self._bring(layer_idx)
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        return found

    def _bring(self, layer_idx: int) -> None:
        """Keeps the one layer that is attended to where the model is, and the others on the CPU."""
        for index, layer in enumerate(self._packed()):
            if index != layer_idx:
                layer.offload()

    def get_mask_sizes(self, given: Any, layer_idx: int) -> tuple[int, int]:
        """Tokens a layer will return, and the first one's slot; the mask function is called next."""
        sizes = super().get_mask_sizes(given, layer_idx)
        expect_mask(self, sizes[0])
        return sizes

    def rows_start_at(self, leftpad: Tensor | None) -> bool:
        """Where rows start, (B,) or None for 0; False where that contradicts what is stored."""
        return self.common.rows_start_at(leftpad, self.length)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row b becomes what row ``beam_idx[b]`` was."""
        super().reorder_cache(beam_idx)
        self._move_starts(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times."""
        super().batch_repeat_interleave(repeats)
        leftpad = self.common.leftpad
        if leftpad is not None:
            self.common.leftpad = leftpad.repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some rows."""
        super().batch_select_indices(indices)
        self._move_starts(indices)

    def _move_starts(self, index: Tensor) -> None:
        leftpad = self.common.leftpad
        if leftpad is not None:
            self.common.leftpad = leftpad[index.to(leftpad.device)]

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        super().reset()
        self.common.leftpad = None

    # -- ours ---------------------------------------------------------------------------

    def _packed(self) -> list[CarambaLayer]:
        return [layer for layer in self.layers if isinstance(layer, CarambaLayer)]

    @property
    def max_seq_len(self) -> int | None:
        """Most tokens of a row; None for no limit."""
        return self.common.limit

    @property
    def max_cache_len(self) -> int:
        """The same as PEFT asks for it: -1 for no limit."""
        return -1 if self.common.limit is None else self.common.limit

    @property
    def length(self) -> int:
        """Tokens of a row, padding included."""
        return max((layer.length for layer in self._packed()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed layers."""
        return sum(layer.nbytes for layer in self._packed())

    @property
    def dequantizations(self) -> int:
        """How many times keys or values of a layer were asked for as tensors; 0 is what is wanted."""
        return self.common.dequantized

    def reserve(self, tokens: int) -> None:
        """Makes room for rows of ``tokens``, in layers that hold some and those that will.

        Raises:
            ValueError: more than ``max_seq_len``.
        """
        self.common.check_length(tokens)
        self.common.room = max(tokens, self.common.room or 0)
        for layer in self._packed():
            layer.reserve(tokens)

    def to(self, device: torch.device | str) -> CarambaCache:
        """Moves everything to a device; returns itself. Attention needs it where the model is."""
        for layer in self.layers:
            if not isinstance(layer, CarambaLayer):
                move_stock(layer, device)
            elif layer.store is not None:
                layer.store = layer.store.to(device)
        if self.common.leftpad is not None:
            self.common.leftpad = self.common.leftpad.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """What is stored, as tensors, numbers and names: for ``torch.save``, and ``weights_only`` loads.

        Layers of other kinds, of a hybrid model, are saved as this version of transformers has them.
        """
        return state_of(self.common, self.layers)

    def load_state_dict(
        self, state: dict[str, Any], device: torch.device | str | None = None
    ) -> CarambaCache:
        """Takes the state of a cache of the same model and storage; returns itself.

        Args:
            device: where it goes; by default where the state's tensors are.

        Raises:
            ValueError: a state of another format, number or kind of layers, or storage.
        """
        load_state(self.common, self.layers, state, device)
        return self


def known_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """What a forward pass shows of the layers' keys, by the layer's number."""
    findings = probe(model)
    pairs = zip(findings.places, findings.shapes, strict=True)
    return {place: shape for place, shape in pairs if isinstance(shape, LayerShape)}
