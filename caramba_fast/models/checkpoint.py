"""Loads a Hugging Face checkpoint folder: config.json and safetensors.

Pickles such as ``pytorch_model.bin`` are refused, because opening one can run code.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor

from caramba_fast.config.files import read_json, shown
from caramba_fast.models.config import CheckpointError, ModelConfig, refuse_adapter
from caramba_fast.models.gguf import SUFFIX as GGUF
from caramba_fast.models.gguf import GgufFile
from caramba_fast.models.hub import local_path
from caramba_fast.models.transformer import Transformer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Dtypes of weights, as safetensors names them.
FLOATS = ("F64", "F32", "F16", "BF16")
#: Dtypes that weights may be loaded in, and the name that stands for the checkpoint's own.
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AUTO = "auto"


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype given as itself or by name; None, for the checkpoint's own, also as "auto".

    Raises ValueError for another name, TypeError for another dtype.
    """
    if isinstance(dtype, str):
        if dtype not in (AUTO, *DTYPES):
            raise ValueError(f"dtype is {dtype!r}; allowed are {', '.join((AUTO, *DTYPES))}")
        return DTYPES.get(dtype)
    if dtype not in (None, *DTYPES.values()):
        raise TypeError(f"dtype is {dtype}; allowed are {', '.join(DTYPES)}, None")
    return dtype


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> Transformer:
    """Loads a model of a natively supported family in eval mode; `caramba_fast.load` takes any causal model.

    Args:
        path: a folder as ``save_pretrained`` writes it, a GGUF file, or a Hub id (``organisation/name``), which is
            downloaded if there is no such path.
        dtype: float32, float16, bfloat16 or their names, or None or "auto" for the checkpoint's own; for GGUF that is
            float32 if all weights are, else bfloat16 or float16.
        device: device of the weights.
        revision: branch, tag or commit of a Hub id.

    Raises:
        TypeError, ValueError: another dtype.
        CheckpointError: the folder is missing, damaged, unsafe or of an unsupported family; the message names the file
            and lists what is missing or unexpected.
    """
    dtype = dtype_of(dtype)
    folder = local_path(path, revision)
    if folder.suffix == GGUF and folder.is_file():
        file = GgufFile(folder)
        wanted = dtype or file.dtype
        config = ModelConfig.from_hf(file.config)
        return assembled(config, file.state(wanted), folder, wanted, device)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; a Hugging Face checkpoint folder is needed"
        )
    refuse_adapter(folder)
    config = _with_generation_ids(ModelConfig.from_file(folder / "config.json"), folder)
    weights = WeightFiles(folder)
    weights.check(config)
    return assembled(config, weights.load(), folder, dtype, device)


def assembled(
    config: ModelConfig,
    state: dict[str, Tensor],
    source: Path,
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Transformer:
    """A model in eval mode made of its weights.

    Args:
        state: weights by Hugging Face's names.
        source: where they are from, for messages.
        dtype, device: as in `load_model`.

    Raises:
        CheckpointError: weights are missing, unexpected, or of another shape.
    """
    config = _tied_as_stored(config, state, source)
    with torch.device("meta"):
        model = Transformer(config)
    _check_names(model, state, source)
    first = next(iter(state.values()))
    wanted = dtype or first.dtype
    state = {name: value.to(device=device, dtype=wanted) for name, value in state.items()}
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.rope = type(model.rope)(config.rope, config.rope_dim)
    return model.eval()


def _tied_as_stored(config: ModelConfig, state: dict[str, Tensor], source: Path) -> ModelConfig:
    """Uses a separate output matrix if the checkpoint has one, whatever its config says, as transformers does."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not config.tie_word_embeddings or head not in state:
        return config
    if embedding not in state:
        state[embedding] = state[head]
    ours, theirs = state[head], state[embedding]
    if ours.shape == theirs.shape and torch.equal(ours, theirs):
        return config
    warnings.warn(
        f"{source} says tie_word_embeddings and has {head} and {embedding}, which differ: both are used",
        stacklevel=3,
    )
    return config.model_copy(update={"tie_word_embeddings": False})


def _with_generation_ids(config: ModelConfig, folder: Path) -> ModelConfig:
    """Takes eos and pad ids from generation_config.json, which has the longer list for chat models."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return config
    try:
        raw = read_json(file)
        ids = {
            name: raw[name]
            for name in ("eos_token_id", "pad_token_id")
            if raw.get(name) is not None
        }
        return ModelConfig.model_validate({**config.model_dump(), **ids})
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not valid: {error}") from error


class WeightFiles:
    """The safetensors files of a folder; headers are checked before weights are read.

    Attributes:
        shapes, dtypes: of every tensor; dtypes as safetensors names them ("F32").

    Raises:
        CheckpointError: a file is missing or damaged, a tensor is in two shards or not in the one the index names, or
            is not a floating-point tensor.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - only loading needs it

        self.folder = folder
        self._open, self._damage = safe_open, (SafetensorError, OSError, ValueError)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._files: dict[str, Path] = {}
        indexed = _weight_map(folder)
        for file in sorted({folder / SINGLE} if indexed is None else set(indexed.values())):
            self._read_header(file, indexed)
        lost = [name for name in indexed or {} if name not in self._files]
        if lost:
            raise CheckpointError(f"{folder / INDEX} names {lost[0][:200]}, which no shard holds")
        if not self._files:
            raise CheckpointError(f"{folder} holds no weights")

    def _read_header(self, file: Path, indexed: dict[str, Path] | None) -> None:
        for name, shape, dtype in self._described(file):
            there = self._files.get(name)
            where = file if indexed is None else indexed.get(name, file)
            if there is not None or where != file:
                raise CheckpointError(
                    f"{name[:200]} is in {file.name}, and {INDEX} names {(there or where).name} for it: a tensor "
                    "belongs to one shard"
                )
            if dtype not in FLOATS:
                raise CheckpointError(
                    f"{name[:200]} in {file} is {dtype}; floating-point weights ({', '.join(FLOATS)}) are needed, "
                    "and quantized ones have to be dequantized first"
                )
            self._files[name], self.shapes[name], self.dtypes[name] = file, shape, dtype

    def _described(self, file: Path) -> list[tuple[str, tuple[int, ...], str]]:
        try:
            with self._open(str(file), framework="pt") as opened:
                slices = [(name, opened.get_slice(name)) for name in opened.keys()]  # noqa: SIM118
                return [(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices]
        except self._damage as error:
            raise CheckpointError(
                f"{file} cannot be read as safetensors: {str(error)[:300]}"
            ) from error

    def check(self, config: ModelConfig) -> None:
        """Raises CheckpointError if ``config`` has larger sizes than the weights, before anything is allocated."""
        stated = {
            "num_hidden_layers": (config.num_hidden_layers, self._layers()),
            "vocab_size": (config.vocab_size, self._size("embed_tokens.weight")),
            "hidden_size": (config.hidden_size, self._size("embed_tokens.weight")),
            "intermediate_size": (config.intermediate_size, self._size("mlp.up_proj.weight")),
        }
        if config.decoupled is None:
            keys = config.num_key_value_heads * config.head_dim
            stated["num_key_value_heads * head_dim"] = keys, self._size("self_attn.k_proj.weight")
        else:
            group = config.num_attention_heads // config.num_key_value_heads
            for name in ("sem", "geo"):
                width = getattr(config.decoupled, f"{name}_dim") // group
                stated[f"{name}_dim"] = width, self._size(f"self_attn.k_{name}_proj.weight")
        wrong = [f"{n} is {a}, and the weights have {b}" for n, (a, b) in stated.items() if a > b]
        if wrong:
            missing = f"; missing model.layers.{self._layers()}" if "layers" in wrong[0] else ""
            raise CheckpointError(
                f"weights in {self.folder} do not fit config.json: {'; '.join(wrong)}{missing}"
            )

    def _layers(self) -> int:
        found = {name.split(".")[2] for name in self.shapes if name.startswith("model.layers.")}
        return len(found)

    def _size(self, ending: str) -> int:
        """The largest dimension of tensors with that name; no limit if there are none."""
        return max(
            (max(s, default=0) for n, s in self.shapes.items() if n.endswith(ending)), default=2**31
        )

    def load(self) -> dict[str, Tensor]:
        """Reads every tensor, by name."""
        state: dict[str, Tensor] = {}
        for file in sorted(set(self._files.values())):
            try:
                with self._open(str(file), framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a dict
                        state[name] = opened.get_tensor(name)
            except self._damage as error:
                raise CheckpointError(
                    f"{file} cannot be read as safetensors: {str(error)[:300]}"
                ) from error
        return state


def _weight_map(folder: Path) -> dict[str, Path] | None:
    """The shard of each tensor; None if there is a single file."""
    if (folder / SINGLE).is_file():
        return None
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt")
        )
        hint = f"; {pickled[0]} is a pickle, which may run code: convert it" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")
    try:
        found: dict[str, str] = read_json(index)["weight_map"]
        names = set(found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a valid index: {shown(error)}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names a file outside the folder: {shown(outside[0])}")
    there = {entry.name for entry in folder.iterdir() if entry.is_file()}
    missing = sorted(names - there)
    if missing:
        listed = ", ".join(name[:200] for name in missing[:8])
        raise CheckpointError(f"{folder} lacks shards named in {INDEX}: {listed}")
    return {name: folder / file for name, file in found.items()}


def _check_names(model: Transformer, state: dict[str, Tensor], folder: Path) -> None:
    """Raises CheckpointError unless there is every parameter in the right shape, and nothing else."""
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight", None)
        state.pop("lm_head.weight", None)
    for name in [name for name in state if name.endswith("rotary_emb.inv_freq")]:
        del state[name]  # written by old transformers; recomputed from the config
    problems = [f"missing {name}" for name in wanted if name not in state]
    problems += [f"unexpected {name[:200]}" for name in state if name not in wanted]
    problems += [
        f"{name} has shape {tuple(value.shape)}, not {wanted[name]}"
        for name, value in state.items()
        if name in wanted and tuple(value.shape) != wanted[name]
    ]
    if problems:
        shown = "; ".join(problems[:8]) + (
            f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        )
        raise CheckpointError(f"weights in {folder} do not fit config.json: {shown}")
