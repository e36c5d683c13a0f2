"""ModelConfig: hyper-parameters of the native Transformer, read from a Hugging Face ``config.json``.

Field names are Hugging Face's, so transformers' folders load as they are, and one written here loads in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from caramba_fast.config.files import explain, read_json, shown

#: Families of Hugging Face checkpoints, and the native one with decoupled attention.
SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "caramba_dba")
#: File of a PEFT adapter in a checkpoint folder.
ADAPTER = "adapter_config.json"
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


#: A size; weights and kernels use 32-bit indices.
Size = Annotated[int, Field(gt=0, lt=2**31)]


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message says why."""


def refuse_adapter(folder: Path) -> None:
    """Raises CheckpointError if a PEFT adapter is in ``folder``, which would be left out silently."""
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} has {ADAPTER}: a PEFT adapter, which is not loaded here; merge it into its model "
            "(merge_and_unload) and save that, load both with peft and give that model to a Generator or Engine, or "
            "remove the file if the weights are merged already"
        )


class UnsupportedCheckpointError(CheckpointError):
    """The native model does not support a checkpoint; transformers may."""


class RopeParameters(BaseModel):
    """Parameters of RoPE, named as in transformers."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: float = Field(default=10000.0, gt=0)
    factor: float = Field(default=1.0, ge=1.0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: Size | None = None
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class DecoupledDims(BaseModel):
    """Widths of decoupled bottleneck attention, summed over all query heads.

    Attributes:
        sem_dim: semantic queries and keys, without position.
        geo_dim: geometric queries and keys, with RoPE.
        v_dim: values.
        null_kv: each kv head has a learned key and value that every query attends to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sem_dim: Size
    geo_dim: Size
    v_dim: Size
    null_kv: bool = False


class ModelConfig(BaseModel):
    """Configuration of a Llama-family decoder, with the fields of transformers' configurations.

    ``qkv_bias`` and ``qk_norm`` tell the families apart.
    """

    model_config = ConfigDict(
        extra="ignore", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    model_type: Literal["llama", "mistral", "qwen2", "qwen3", "caramba_dba"] = "llama"
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Annotated[Size, Field(multiple_of=2)]
    max_position_embeddings: Size = 2048
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: RopeParameters = RopeParameters()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    decoupled: DecoupledDims | None = None
    sliding_window: Size | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if (self.decoupled is None) == (self.model_type == "caramba_dba"):
            raise ValueError("decoupled widths belong to model_type 'caramba_dba', and to no other")
        if self.decoupled is not None:
            if self.sliding_window is not None:
                raise ValueError(
                    f"sliding_window is {self.sliding_window}; decoupled attention has no window of its own, None is "
                    "allowed (decode_local_window of a decode plan reads less of a cache)"
                )
            for name in ("sem_dim", "geo_dim", "v_dim"):
                if getattr(self.decoupled, name) % self.num_attention_heads:
                    raise ValueError(
                        f"{name} ({getattr(self.decoupled, name)}) must be a multiple of "
                        f"num_attention_heads ({self.num_attention_heads})"
                    )
            if self.rope_dim % 2:
                raise ValueError(
                    f"geo_dim over num_attention_heads is {self.rope_dim}; RoPE needs it even"
                )
        return self

    @property
    def rope_dim(self) -> int:
        """Values of a head that RoPE rotates."""
        if self.decoupled is None:
            return self.head_dim
        return self.decoupled.geo_dim // self.num_attention_heads

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Translates the dict of a Hugging Face ``config.json``.

        Raises:
            CheckpointError: an unsupported family, activation or rope type, quantized weights, or a missing field.
        """
        family = raw.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise UnsupportedCheckpointError(
                f"model_type is {shown(family)}; the native model supports {', '.join(SUPPORTED_FAMILIES)}"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedCheckpointError(
                f"hidden_act is {shown(raw['hidden_act'])}; only 'silu' is supported"
            )
        if quantized := raw.get("quantization_config"):
            raise UnsupportedCheckpointError(
                f"quantization_config is {shown(quantized)}; the native model computes with weights as they are stored"
            )
        fields = {name: raw[name] for name in cls.model_fields if raw.get(name) is not None}
        fields["num_key_value_heads"] = fields.get(
            "num_key_value_heads", raw.get("num_attention_heads")
        )
        if "head_dim" not in fields:
            fields["head_dim"] = _integer(raw, "hidden_size") // _integer(
                raw, "num_attention_heads"
            )
        fields["rope"] = _rope_from_hf(raw)
        fields["qkv_bias"] = family == "qwen2" or bool(raw.get("attention_bias", False))
        fields["o_bias"] = family != "qwen2" and bool(raw.get("attention_bias", False))
        fields["qk_norm"] = family == "qwen3"
        fields["sliding_window"] = _uniform_window(raw, family)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise CheckpointError(
                f"config.json is no valid {family} config: {explain(error)}"
            ) from error

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads ``config.json``; raises CheckpointError, naming the file, if it is missing or damaged."""
        try:
            raw = read_json(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist") from error
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object")
        return cls.from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` dict that transformers loads.

        Raises ValueError for settings that a file of this ``model_type`` cannot hold, such as a Llama's sliding window.
        """
        architecture = {
            "llama": "LlamaForCausalLM",
            "mistral": "MistralForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "caramba_dba": "CarambaDBAForCausalLM",
        }[self.model_type]
        own = {"rope", "qkv_bias", "o_bias", "qk_norm"}
        own |= {"decoupled"} if self.decoupled is None else set()
        rope = self.rope.model_dump(include=_ROPE_FIELDS[self.rope.rope_type], exclude_none=True)
        raw = {
            "architectures": [architecture],
            "hidden_act": "silu",
            "attention_bias": self.qkv_bias and self.model_type != "qwen2",
            "rope_parameters": rope,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": None if self.rope.rope_type == "default" else rope,
            "dtype": "float16",
            "torch_dtype": "float16",
            "use_cache": True,
            # None is written out, because transformers has other defaults for these fields.
            **self.model_dump(mode="json", exclude=own),
        }
        if self.model_type in ("qwen2", "qwen3"):
            kind = "full_attention" if self.sliding_window is None else "sliding_attention"
            raw["use_sliding_window"] = self.sliding_window is not None
            raw["max_window_layers"] = 0 if self.sliding_window else self.num_hidden_layers
            raw["layer_types"] = [kind] * self.num_hidden_layers
        read = ModelConfig.from_hf(raw)
        lost = [name for name, value in self if name != "rope" and getattr(read, name) != value]
        if lost:
            raise ValueError(
                f"config.json of {self.model_type!r} cannot hold "
                + ", ".join(f"{name}={getattr(self, name)!r}" for name in lost)
            )
        return raw


_ROPE_BASE = {"rope_type", "rope_theta"}
#: Fields that transformers expects for each RoPE type.
_ROPE_FIELDS = {
    "default": _ROPE_BASE,
    "linear": _ROPE_BASE | {"factor"},
    "llama3": _ROPE_BASE
    | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": _ROPE_BASE
    | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"}
    | {"mscale", "mscale_all_dim", "truncate"},
}


def _integer(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if type(value) is not int or not 0 < value < 2**31:
        raise CheckpointError(f"{name} is {shown(value)}; a positive integer below 2**31 is needed")
    return value


def _rope_from_hf(raw: dict[str, Any]) -> RopeParameters:
    """transformers 5 writes ``rope_parameters``; 4.x ``rope_theta`` and ``rope_scaling``."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        given = raw.get(name) or {}
        if not isinstance(given, dict):
            raise CheckpointError(f"{name} is {shown(given)}; an object is needed")
        part = dict(given)
        if "type" in part:
            part.setdefault("rope_type", part.pop("type"))
        if other := [key for key in found if given and part.get(key) != found[key]]:
            raise CheckpointError(
                f"rope_scaling has {other[0]}={shown(found[other[0]])} and rope_parameters "
                f"{shown(part.get(other[0]))}; keep one of them"
            )
        found.update(part)
    rope_type = found.get("rope_type", "default")
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedCheckpointError(
            f"rope_type is {shown(rope_type)}; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    found["rope_type"] = rope_type
    if rope_type in ("linear", "llama3") and found.get("factor") is None:
        raise CheckpointError(f"rope_type {rope_type!r} needs a factor, and there is none")
    trained = raw.get("original_max_position_embeddings")
    if trained is not None and rope_type in ("llama3", "yarn"):
        # As in transformers, this takes precedence over the value in the object.
        found["original_max_position_embeddings"] = trained
    longest = raw.get("max_position_embeddings") or 2048
    defaults = {
        "rope_theta": raw.get("rope_theta") or 10000.0,
        "original_max_position_embeddings": longest,
    }
    found.update({name: value for name, value in defaults.items() if found.get(name) is None})
    partial = found.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedCheckpointError(
            f"partial_rotary_factor is {shown(partial)}; only 1 is supported for this family"
        )
    try:
        rope = RopeParameters.model_validate({k: v for k, v in found.items() if v is not None})
    except ValidationError as error:
        raise CheckpointError(f"rope_parameters are not valid: {explain(error)}") from error
    if rope_type == "yarn" and found.get("factor") is None:
        trained = rope.original_max_position_embeddings or longest
        return rope.model_copy(
            update={"factor": _integer(raw, "max_position_embeddings") / trained}
        )
    return rope


def _uniform_window(raw: dict[str, Any], family: str) -> int | None:
    """The sliding window all layers share, or None; raises if layers differ."""
    uses = {"llama": False, "caramba_dba": True, "mistral": True}.get(
        family, bool(raw.get("use_sliding_window", False))
    )
    if family == "mistral" and "sliding_window" not in raw:
        return 4096  # transformers' default
    if "sliding_window" not in raw and uses and family in ("qwen2", "qwen3"):
        raw = {**raw, "sliding_window": 4096}  # transformers' default; layer_types is checked below
    if raw.get("sliding_window") is None or not uses:
        return None
    if family == "caramba_dba":
        return _integer(raw, "sliding_window")  # rejected by ModelConfig
    window, layers = _integer(raw, "sliding_window"), _integer(raw, "num_hidden_layers")
    kinds = raw.get("layer_types")
    known = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    if kinds is not None and not known:
        raise CheckpointError(
            f"layer_types is {shown(kinds)}; a list with one entry a layer is needed"
        )
    if family == "mistral":
        return window  # all its layers are alike, whatever layer_types says
    if kinds is None:
        first = raw.get("max_window_layers", 28)
        if type(first) is not int:
            raise CheckpointError(f"max_window_layers is {shown(first)}; an integer is needed")
        full, sliding = first > 0, first < layers
    else:
        sliding, full = "sliding_attention" in kinds, set(kinds) != {"sliding_attention"}
    if not sliding and (kinds is None or set(kinds) == {"full_attention"}):
        return None
    if full:
        raise UnsupportedCheckpointError(
            "layer_types mixes full and sliding attention, which the native model does not support"
        )
    return window
