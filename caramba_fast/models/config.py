"""Hyper-parameters of the native Transformer, read from a Hugging Face ``config.json``.

Field names are Hugging Face's, so that a checkpoint folder written by transformers
needs no translation and one written here loads in ``AutoModelForCausalLM``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used, and why."""


class RopeParameters(BaseModel):
    """Rotary frequencies: ``rope_type`` and what it needs (names as in transformers)."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: float = Field(default=10000.0, gt=0)
    factor: float = Field(default=1.0, ge=1.0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class ModelConfig(BaseModel):
    """A Llama-family decoder.

    Attributes follow transformers' ``LlamaConfig`` / ``Qwen2Config`` / ``Qwen3Config`` /
    ``MistralConfig``; ``qkv_bias`` and ``qk_norm`` are what tells the families apart.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = Field(default=2048, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope: RopeParameters = RopeParameters()
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = Field(default=None, gt=0)
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
        return self

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Translates the dict of a Hugging Face ``config.json``.

        Raises:
            CheckpointError: an unsupported family, activation or rope type, or a missing field.
        """
        family = raw.get("model_type")
        if family not in SUPPORTED_FAMILIES:
            raise CheckpointError(
                f"model_type is {family!r}; the native model supports {', '.join(SUPPORTED_FAMILIES)}"
            )
        if raw.get("hidden_act", "silu") != "silu":
            raise CheckpointError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
        fields = {name: raw[name] for name in cls.model_fields if raw.get(name) is not None}
        heads = raw.get("num_attention_heads")
        fields.setdefault("num_key_value_heads", heads)
        if "head_dim" not in fields and heads and raw.get("hidden_size"):
            fields["head_dim"] = raw["hidden_size"] // heads
        fields["rope"] = _rope_from_hf(raw)
        fields["qkv_bias"] = family == "qwen2" or bool(raw.get("attention_bias", False))
        fields["o_bias"] = family != "qwen2" and bool(raw.get("attention_bias", False))
        fields["qk_norm"] = family == "qwen3"
        fields["sliding_window"] = _uniform_window(raw, family)
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise CheckpointError(f"config.json is not a valid {family} config: {error}") from error

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Reads ``config.json``; raises CheckpointError naming the file when it is damaged."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist") from error
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path} holds a {type(raw).__name__}, not an object")
        return cls.from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` dict that transformers loads."""
        architecture = {
            "llama": "LlamaForCausalLM",
            "mistral": "MistralForCausalLM",
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
        }[self.model_type]
        own = {"rope", "qkv_bias", "o_bias", "qk_norm"}
        fields = self.model_dump(mode="json", exclude=own, exclude_none=True)
        rope = self.rope.model_dump(exclude_none=True, exclude_defaults=True)
        rope.setdefault("rope_theta", self.rope.rope_theta)
        rope.setdefault("rope_type", self.rope.rope_type)
        scaling = None if self.rope.rope_type == "default" else rope
        return {
            "architectures": [architecture],
            "hidden_act": "silu",
            "attention_bias": self.qkv_bias and self.model_type != "qwen2",
            "rope_parameters": rope,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": scaling,
            "dtype": "float16",
            "torch_dtype": "float16",
            "use_cache": True,
            **fields,
        }


def _rope_from_hf(raw: dict[str, Any]) -> RopeParameters:
    """transformers 5 writes ``rope_parameters``; 4.x ``rope_theta`` and ``rope_scaling``."""
    found: dict[str, Any] = dict(raw.get("rope_scaling") or {})
    found.update(raw.get("rope_parameters") or {})
    rope_type = found.get("rope_type", found.pop("type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(
            f"rope_type is {rope_type!r}; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    found["rope_type"] = rope_type
    found.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    if found.get("original_max_position_embeddings") is None:
        found["original_max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    if float(found.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))) != 1.0:
        raise CheckpointError("partial_rotary_factor other than 1 is not supported by this family")
    try:
        return RopeParameters.model_validate({k: v for k, v in found.items() if v is not None})
    except ValidationError as error:
        raise CheckpointError(f"rope_parameters are not valid: {error}") from error


def _uniform_window(raw: dict[str, Any], family: str) -> int | None:
    """The sliding window all layers share, or None; a mix of layers is refused."""
    window = raw.get("sliding_window")
    if window is None or family == "llama":
        return None
    if family in ("qwen2", "qwen3") and not raw.get("use_sliding_window", False):
        return None
    kinds = set(raw.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    first_windowed = raw.get("max_window_layers", 0) if family != "mistral" else 0
    if kinds != {"sliding_attention"} or (first_windowed and not raw.get("layer_types")):
        raise CheckpointError(
            "layers that mix full and sliding attention are not supported by the native model"
        )
    return int(window)
