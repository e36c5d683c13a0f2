"""SavedPart: the state of one model (target or draft) in a saved session: tokens, cache and random state."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.cache.state import without_leftovers
from caramba_fast.config.files import shown
from caramba_fast.config.kvcache import KVCacheTensorConfig, ring_size
from caramba_fast.infer.sequence import TokenSequence
from caramba_fast.infer.stepwise import StepwiseGenerator
from caramba_fast.models.identity import model_digest

#: Stream settings that may differ from the file's: codes are read alike, and rings are resized.
ANY = {"fit", "tail_slack"}
#: Tensors of a stream.
BUFFERS = ("codes", "scales", "tail", "sink")


class SessionError(ValueError):
    """A file that is not a session, or does not fit this generator; the message says why."""


class SavedPart(BaseModel):
    """The state of one model: the target or a draft.

    Attributes:
        model, model_name: its digest and class name.
        layout: what each layer caches.
        storage: how each stream is stored.
        counts: tokens of each row.
        layers: the state of each layer's cache, without tensors.
        random: device type of the random state; None for torch's global generator.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: str
    model_name: str
    layout: list[dict[str, Any]]
    storage: dict[str, dict[str, Any]]
    counts: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    layers: list[dict[str, Any]] = Field(min_length=1)
    random: str | None


def part_of(
    generator: StepwiseGenerator, prefix: str, rng: torch.Generator | None, tensors: dict[str, Tensor]
) -> SavedPart:  # fmt: skip
    """The state of a generator; its tensors are added to ``tensors`` under ``prefix``."""
    model, session = model_digest(generator.model), generator._session
    session.drop_padding()
    assert session.cache is not None
    layers = []
    for index, layer in enumerate(session.cache):
        state = without_leftovers(layer.state_dict())
        for name, stream in state["streams"].items():
            for key in BUFFERS:
                if (buffer := stream.pop(key)) is not None:
                    tensors[f"{prefix}.layers.{index}.{name}.{key}"] = buffer
        layers.append(state)
    ids = [torch.tensor(row.tokens, dtype=torch.int64, device="cpu") for row in session.rows]
    tensors[f"{prefix}.tokens"] = torch.cat(ids)
    if rng is not None:
        tensors[f"{prefix}.random"] = rng.get_state()
    return SavedPart(
        model=model,
        model_name=type(generator.model).__name__,
        layout=_layout(generator),
        storage={name: layers[0]["streams"][name]["config"] for name in layers[0]["streams"]},
        counts=[len(row) for row in session.rows],
        layers=layers,
        random=None if rng is None else rng.device.type,
    )


def _layout(generator: StepwiseGenerator) -> list[dict[str, Any]]:
    return [
        {"shape": type(layer).__name__}
        | {name: x for name, x in vars(layer).items() if name != "query_rms"}
        for layer in generator.model.cache_layout
    ]


def part_problems(
    generator: StepwiseGenerator,
    part: SavedPart,
    tensors: Mapping[str, Tensor],
    name: str,
    kind: str | None = None,
) -> list[str]:
    """Why a part does not fit the generator's model or cache, or is inconsistent; ``kind`` is the file's cache spec."""
    mine = _layout(generator)
    if part.layout != mine:
        theirs = f"{len(part.layout)} layers of {shown(part.layout[:1])}"
        return [
            f"the {name} model caches {len(mine)} layers of {shown(mine[:1])}; the session has {theirs}"
        ]
    if part.model != model_digest(generator.model):
        return [
            f"the {name} model's weights or configuration are not those of the {shown(part.model_name)} it was saved "
            "with"
        ]
    found = _storage_problems(generator, part)
    if name == "draft":
        found = [f"draft model: {problem}" for problem in found]
    if found and kind not in (None, generator.config.cache_name):
        return [f"cache is {generator.config.cache_name!r}, the session has {shown(kind)}"]
    return found or _token_problems(generator, part, tensors.get(f"{name}.tokens"))


def _storage_problems(generator: StepwiseGenerator, part: SavedPart) -> list[str]:
    configs = generator.config.stream_configs()
    if "k_sem" in part.storage and "k_sem_cfg" not in configs:
        configs = {"k_sem_cfg": configs["k_cfg"], "k_geo_cfg": configs["k_cfg"], **configs}
    found = []
    for name, theirs in part.storage.items():
        config = configs.get(f"{name}_cfg")
        mine = {} if config is None else config.model_dump(mode="json")
        found += [
            f"{key} of {name} is {shown(mine.get(key))}, the session has {shown(theirs.get(key))}"
            for key in sorted({*mine, *theirs} - ANY)
            if mine.get(key) != theirs.get(key)
        ]
    return found


def _token_problems(generator: StepwiseGenerator, part: SavedPart, ids: Tensor | None) -> list[str]:
    lengths = [layer.get("lengths") for layer in part.layers]
    held = lengths[0]
    if not isinstance(held, list) or len(held) != len(part.counts):
        return ["its layers do not have the same rows"]
    if any(other != held for other in lengths) or len(lengths) != len(part.layout):
        return ["its layers do not have the same rows"]
    if not all(
        type(n) is int and 0 <= n <= count for n, count in zip(held, part.counts, strict=True)
    ):
        return [f"its rows have {shown(part.counts)} tokens and {shown(held)} cached"]
    if ids is None or ids.dtype != torch.int64 or ids.shape != (sum(part.counts),):
        return [f"it has no {sum(part.counts)} tokens"]
    size = generator.model.vocab_size
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        return [f"it has token ids outside the vocabulary of {size}"]
    return []


def random_problem(
    generator: StepwiseGenerator, part: SavedPart, state: Tensor | None
) -> list[str]:  # fmt: skip
    """Why the random state cannot be restored."""
    device = generator.model.device.type
    if part.random != device:
        return [
            f"its random numbers are of device {shown(part.random)}, and the model is on {device}; give a seed"
        ]
    fresh = torch.Generator(generator.model.device).get_state()
    if state is None or state.dtype != torch.uint8 or state.shape != fresh.shape:
        return ["its random numbers are not of this version of torch; give a seed"]
    return []


def random_of(generator: StepwiseGenerator, part: SavedPart, state: Tensor) -> torch.Generator:
    """The restored random generator; raises SessionError if torch rejects the state."""
    made = torch.Generator(generator.model.device)
    try:
        made.set_state(state)
    except RuntimeError as error:
        raise SessionError(f"the {part.random} random numbers cannot go on: {error}") from None
    return made


def opened(
    generator: StepwiseGenerator, part: SavedPart, name: str, tensors: Mapping[str, Tensor]
) -> tuple[ModelKVCache, list[TokenSequence]]:
    """A new cache and rows with the state of a part; raises SessionError if it does not fit or is inconsistent."""
    cache = generator._choice.new_cache(len(part.counts))
    for index, (layer, saved) in enumerate(zip(cache, part.layers, strict=True)):
        try:
            state = _with_tensors(saved, f"{name}.layers.{index}", tensors)
            layer.load_state_dict(_with_slack(state, layer.tail_slack))
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise SessionError(
                f"it does not fit: layer {index} of the {name}: {str(error)[:1000]}"
            ) from None
    ids = tensors[f"{name}.tokens"].split(part.counts)
    return cache, [TokenSequence(array("q", row.tolist())) for row in ids]


def _with_tensors(
    state: dict[str, Any], prefix: str, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The state of a layer in the form of `LayerCache.load_state_dict`."""
    streams = {
        name: {**stream, **{key: tensors.get(f"{prefix}.{name}.{key}") for key in BUFFERS}}
        for name, stream in state["streams"].items()
    }
    return {**state, "streams": streams}


def _with_slack(state: dict[str, Any], slack: int) -> dict[str, Any]:
    """The state of a layer with fp16 rings of another tail_slack, which keep the newest tokens that fit.

    Raises ValueError if the size of a ring does not match its settings.
    """
    configs = {x: KVCacheTensorConfig(**part["config"]) for x, part in state["streams"].items()}
    changed = {x: y.model_copy(update={"tail_slack": slack}) for x, y in configs.items()}
    if changed == configs:
        return state
    old, new = ring_size(configs.values()), ring_size(changed.values())
    lengths, streams = state["lengths"], {}
    row = torch.arange(len(lengths), device="cpu")[:, None]
    position = torch.tensor(lengths, device="cpu")[:, None] - torch.arange(
        1, min(old, new) + 1, device="cpu"
    )
    for name, part in state["streams"].items():
        tail = part["tail"]
        if old:
            if not isinstance(tail, Tensor) or tail.ndim != 4 or tail.shape[::2] != (len(row), old):
                raise ValueError(f"the tail of {name} has no {old} tokens of {len(row)} rows")
            ring = tail.new_zeros((*tail.shape[:2], new, tail.shape[3]))
            ring[row, :, position % new] = tail[row, :, position % old]
            tail = ring
        config = changed[name].model_dump(mode="json")
        streams[name] = {**part, "config": config, "tail": tail}
    lowest = state["tail_lowest"]
    if old:
        held = zip(lowest, lengths, strict=True)
        lowest = [max(low, length - min(old, new)) for low, length in held]
    return {**state, "streams": streams, "tail_lowest": lowest}
