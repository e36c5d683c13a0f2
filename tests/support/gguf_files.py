"""Writes models of transformers as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from caramba_fast.models import demo_path, demo_tokenizer

#: Names within a layer in Hugging Face's models and in llama.cpp.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys in llama.cpp's order: `LlamaModel.permute` of its convert_hf_to_gguf.py."""
    shape = weights.shape
    return (
        weights.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
    )


def write_gguf(
    path: Path, model: Any, architecture: str, *, kind: str = "F32",
    said: dict[str, Any] | None = None, extra: dict[str, np.ndarray] | None = None, tokenizer: Any = None,
    pre: str | None = None,
) -> None:  # fmt: skip
    """Writes a causal language model of transformers to a file.

    ``kind`` is the type of the matrices, as in Q8_0. ``said`` is further metadata, without the architecture's prefix;
    ``extra`` are further tensors. ``tokenizer`` is a byte-level `tokenizers.Tokenizer`, ``pre`` its pre-tokenizer.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    numbers = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "rope.dimension_count": head,
        "attention.key_length": head, "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), **(said or {}),
    }  # fmt: skip
    for name, value in numbers.items():
        if value is None:
            continue
        add = {
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            bool: writer.add_bool,
        }
        add[type(value)](f"{architecture}.{name}", value)
    _add_tokenizer(writer, tokenizer, config)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_llama_cpp(name, tensor.float().numpy(), config, architecture)
        _add(writer, _name(name, architecture), values, kind if values.ndim == 2 else "F32")
    for name, values in (extra or {}).items():
        _add(writer, name, values, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_demo(path: Path, **options: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    theta = float(model.config.rope_parameters["rope_theta"])
    options = {"said": {"rope.freq_base": theta}, "pre": "gpt-2", **options}
    write_gguf(path, model, "llama", tokenizer=demo_tokenizer(), **options)


def _add_tokenizer(writer: Any, tokenizer: Any, config: Any) -> None:
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)
    if tokenizer is not None:
        import json

        model = json.loads(tokenizer.to_str())["model"]
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())])
        special = set(tokenizer.get_added_tokens_decoder())
        writer.add_token_types(
            [3 if i in special else 1 for i in range(tokenizer.get_vocab_size())]
        )
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])


def _name(name: str, architecture: str) -> str:
    stem, _, ending = name.rpartition(".")
    names = {**NAMES, **GEMMA} if architecture == "gemma3" else NAMES
    if stem in TOP:
        return f"{TOP[stem]}.{ending}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{ending}"


def _as_llama_cpp(name: str, values: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    if architecture == "llama" and "q_proj" in name:
        return permuted(values, config.num_attention_heads)
    if architecture == "llama" and "k_proj" in name:
        return permuted(values, config.num_key_value_heads)
    return values


def _add(writer: Any, name: str, values: np.ndarray, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    packed = gguf.quants.quantize(np.ascontiguousarray(values), number)
    writer.add_tensor(name, packed, raw_dtype=number)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(B, T, V) logits of a sequence, of our models or transformers'."""
    with torch.no_grad():
        found = model(ids)
    return getattr(found, "logits", found)
