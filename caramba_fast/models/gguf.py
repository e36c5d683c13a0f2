"""GgufFile: model configuration and dequantized weights from a GGUF file, as llama.cpp writes it.

Weights are read with the ``gguf`` package. All that changes the result is converted: RoPE scaling (in the metadata, or
as factors in ``rope_freqs.weight``), sliding windows, tied embeddings, the rows of Llama's queries and keys, which
llama.cpp interleaves, and Gemma's norms, to which it adds 1. Anything unknown is rejected by name. Names of fields and
tensors: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caramba_fast.config.files import shown
from caramba_fast.models.config import CheckpointError

SUFFIX = ".gguf"
#: Architecture of a file -> Hugging Face's model_type. Mistral's files say "llama".
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
#: Tensor of a file without ``.weight`` or ``.bias`` -> Hugging Face's name.
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
GEMMA_BLOCK = {
    **BLOCK, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
#: The lists of the vocabulary, which are long.
LISTS = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")}
#: Those that are read.
LISTED = ("tokens", "token_type")
#: Tokens that end an answer whatever ids the metadata has: like llama.cpp, they are known by their text, since many
#: files name only the end of a document (Gemma, Llama) or of a turn (Qwen). The last few begin another file of code.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|fim_pad|>", "<|repo_name|>", "<reponame>", "<|file_sep|>",
)  # fmt: skip
#: Factors of Llama 3's RoPE frequencies.
ROPE_FACTORS = "rope_freqs.weight"
#: low_freq_factor, high_freq_factor and original context of every Llama 3; a file only has the resulting factors.
LLAMA3 = (1.0, 4.0, 8192)
#: Number of layers of the one Gemma 3 whose query scale is not the head size, and its scale.
GEMMA_27B = (62, 168)


class GgufFile:
    """Configuration and weights of a file, in Hugging Face's terms.

    Attributes:
        config: as in a ``config.json``.
        tokens: texts of the vocabulary, as in the file; empty if it has none.
        token_types: llama.cpp's type of each token (3 is control, 4 user-defined); empty if it has none.

    Raises:
        CheckpointError: a damaged file, an unknown architecture, or unsupported settings; the message names them.
        ModuleNotFoundError: the gguf package is missing.
    """

    def __init__(self, path: Path) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise ModuleNotFoundError(f"{path.name} needs the gguf package (pip install gguf)")
        self._gguf = importlib.import_module("gguf")
        self.path = path
        try:
            reader = _reader(self._gguf, path)
            self._said = {
                name: field.contents() for name, field in reader.fields.items() if name not in LISTS
            }
            tokens, kinds = (_parts(reader, f"tokenizer.ggml.{name}") for name in LISTED)
            self.tokens = [part.tobytes().decode(errors="replace") for part in tokens]
            self.token_types = np.concatenate(kinds).tolist() if kinds else []
        except Exception as error:  # of numpy, struct and others
            raise CheckpointError(f"{path} cannot be read as GGUF: {str(error)[:300]}") from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self._said.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path.name}: the architecture is {self.architecture!r}; allowed are {', '.join(ARCHITECTURES)}"
            )
        if reason := _why_misread(reader, self._said.get("split.count")):
            raise self._wrong(reason)
        self._check_types()
        self.config = self._config()

    @property
    def tokenizer(self) -> tuple[str | None, str | None, bool | None]:
        """Kind of the tokenizer, its pre-tokenizer, and whether it adds BOS."""
        names = ("model", "pre", "add_bos_token")
        kind, cut, begins = (self._said.get(f"tokenizer.ggml.{name}") for name in names)
        return kind, cut, begins

    @property
    def prefixes_space(self) -> bool:
        """Whether a SentencePiece tokenizer adds a space in front of a text, which is the default."""
        return self._said.get("tokenizer.ggml.add_space_prefix") is not False

    @property
    def dtype(self) -> torch.dtype:
        """The default dtype of the weights; Gemma's activations exceed the range of float16."""
        kinds = {tensor.tensor_type.name for tensor in self._tensors.values()}
        if kinds == {"F32"}:
            return torch.float32
        wide = "BF16" in kinds or self.architecture == "gemma3"
        return torch.bfloat16 if wide else torch.float16

    def _check_types(self) -> None:
        names = self._gguf.GGMLQuantizationType.__members__
        known = {"F32", "F16", *(name for name in vars(self._gguf.quants) if name in names)}
        for tensor in self._tensors.values():
            if tensor.tensor_type.name not in known:
                raise self._wrong(
                    f"{tensor.name} is {tensor.tensor_type.name}; allowed are {', '.join(sorted(known))}"
                )

    def _wrong(self, said: str) -> CheckpointError:
        return CheckpointError(f"{self.path.name}: {said}")

    def _get(self, name: str, default: Any = None) -> Any:
        return self._said.get(f"{self.architecture}.{name}", default)

    def _need(self, name: str) -> Any:
        found = self._get(name)
        if found is None:
            raise self._wrong(f"{self.architecture}.{name} is missing")
        return found

    def _size(self, name: str, default: int | None = None) -> int:
        """A positive integer; it has to be there where there is no default."""
        found = self._need(name) if default is None else self._get(name, default)
        if type(found) is not int or not 0 < found < 2**31:
            raise self._wrong(
                f"{self.architecture}.{name} is {shown(found)}; a positive integer below 2**31 is needed"
            )
        return found

    def _number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; it has to be there where there is no default."""
        found = self._need(name) if default is None else self._get(name, default)
        if type(found) not in (int, float) or not 0 < found < math.inf:
            raise self._wrong(
                f"{self.architecture}.{name} is {shown(found)}; a finite number above 0 is needed"
            )
        return float(found)

    def _cap(self, name: str) -> float | None:
        """A bound of logits; None if there is none, which llama.cpp also writes as 0."""
        return self._number(name) if self._get(name) else None

    def _config(self) -> dict[str, Any]:
        if self._get("expert_count"):
            raise self._wrong("mixtures of experts are not supported")
        if self._get("attention.causal", True) is not True:
            raise self._wrong(
                f"{self.architecture}.attention.causal is {shown(self._get('attention.causal'))}: models whose tokens "
                "see later ones are not supported"
            )
        if "token_embd.weight" not in self._tensors:
            raise self._wrong("token_embd.weight is missing")
        if len(self._tensors["token_embd.weight"].shape) != 2:
            raise self._wrong("token_embd.weight is no matrix")
        for name in ("attention.head_count", "attention.head_count_kv"):
            if isinstance(self._get(name), list):
                raise self._wrong(f"{name} differs from layer to layer: not supported")
        heads, hidden = self._size("attention.head_count"), self._size("embedding_length")
        kv_heads = self._size("attention.head_count_kv", heads)
        head = self._size("rope.dimension_count", hidden // heads)
        head = self._size("attention.key_length", head)
        for name in ("attention.value_length", "rope.dimension_count"):
            if self._get(name, head) != head:
                raise self._wrong(
                    f"{name} is {self._get(name)}; that of a key ({head}) is supported"
                )
        if any(name.startswith("blk.") for name in self._tensors):  # else it has a tokenizer only
            self._check_layers()
        ends = self._ends()
        config = {
            "model_type": ARCHITECTURES[self.architecture],
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden, "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"), "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": head,
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._id("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
            "pad_token_id": self._id("padding"),
        }  # fmt: skip
        if self.architecture == "gemma3":
            return {**config, **self._gemma(config)}
        config["rope_parameters"] = self._rope(config)
        if self.architecture == "llama":
            config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
            config["mlp_bias"] = "blk.0.ffn_up.bias" in self._tensors
        window = self._get("attention.sliding_window")
        if window:
            if self.architecture != "llama":
                raise self._wrong(f"attention.sliding_window is {window}: not supported for it")
            config |= {"model_type": "mistral", "sliding_window": window}
        return config

    def _check_layers(self) -> None:
        """Refuses more layers than the weights have, before lists and modules of that many are made."""
        said = self._size("block_count")
        layers = len({name.split(".")[1] for name in self._tensors if name.startswith("blk.")})
        if said > layers:
            raise self._wrong(
                f"{self.architecture}.block_count is {said}; the weights have {layers}; missing model.layers.{layers}"
            )

    def _id(self, name: str) -> int | None:
        found = self._said.get(f"tokenizer.ggml.{name}_token_id")
        if found is not None and type(found) is not int:
            raise self._wrong(
                f"tokenizer.ggml.{name}_token_id is {shown(found)}; an integer is needed"
            )
        return found

    def _ends(self) -> list[int]:
        """Tokens that end an answer: those in the metadata, EOS first, and those known by their text."""
        known = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        ids = [*map(self._id, ("eos", "eot", "eom")), *map(known.get, ENDS)]
        # Some files have ids outside the vocabulary.
        rows = int(self._tensors["token_embd.weight"].shape[1])
        return [end for end in dict.fromkeys(ids) if end is not None and 0 <= end < rows]

    def _rope(self, config: dict[str, Any]) -> dict[str, Any]:
        """``rope_parameters``; raises CheckpointError for a scaling that is not known."""
        base = self._number("rope.freq_base", 10000.0)
        names = ("rope.scaling.factor", "rope.scale_linear")
        given = [name for name in names if self._get(name) is not None][:1]
        # llama.cpp takes a scaling without a type for linear, and 0 for no scaling.
        factor = next((self._number(name) if self._get(name) else 1.0 for name in given), None)
        kind = self._get("rope.scaling.type", "none" if factor in (None, 1.0) else "linear")
        if kind != "yarn" and self._get("rope.scaling.attn_factor") not in (None, 1.0):
            raise self._wrong("rope.scaling.attn_factor is given without yarn: not supported")
        if ROPE_FACTORS in self._tensors:
            if kind != "none":
                raise self._wrong(f"{ROPE_FACTORS} and rope.scaling.type {kind!r} are both given")
            return {"rope_theta": base, **self._llama3(base, config["head_dim"])}
        if kind == "none":
            return {"rope_type": "default", "rope_theta": base}
        if factor is None and kind in ("linear", "yarn"):
            factor = self._number("rope.scaling.factor")
        if kind == "linear":
            return {"rope_type": "linear", "rope_theta": base, "factor": factor}
        plain = {"log_multiplier": (None, 0.0), "attn_factor": (None,), "ext_factor": (None, 1.0)}
        scaling = {n: self._get(f"rope.scaling.yarn_{n}") for n in plain}
        own = [f"yarn_{n}" for n, x in scaling.items() if x not in plain[n]]
        if kind != "yarn" or own:
            raise self._wrong(
                f"rope.scaling.type is {shown(kind)}{''.join(f' with {name}' for name in own)}; allowed are none, "
                "linear, and yarn without a log multiplier, attn_factor or ext_factor of its own"
            )
        factor = factor or 1.0
        found = {
            "rope_type": "yarn", "rope_theta": base, "factor": factor,
            "original_max_position_embeddings": self._size("rope.scaling.original_context_length"),
            "attention_factor": self._number("rope.scaling.attn_factor", 1.0) * (1 + 0.1 * math.log(factor)),
        }  # fmt: skip
        for name in ("beta_fast", "beta_slow"):
            if self._get(f"rope.scaling.yarn_{name}") is not None:
                found[name] = self._number(f"rope.scaling.yarn_{name}")
        return found

    def _llama3(self, base: float, head: int) -> dict[str, Any]:
        """Llama 3's RoPE parameters, recovered from the frequency factors; CheckpointError for other factors."""
        given = np.asarray(self._tensors[ROPE_FACTORS].data, dtype=np.float64).ravel()
        factor, (low, high, trained) = float(given.max(initial=0.0)) or 1.0, LLAMA3
        waves = 2 * np.pi * base ** (np.arange(0, head, 2) / head)
        smooth = np.clip((trained / waves - low) / (high - low), 0.0, 1.0)
        wanted = 1 / ((1 - smooth) / factor + smooth)
        if given.shape != wanted.shape or not np.allclose(given, wanted, rtol=1e-3):
            raise self._wrong(
                f"{ROPE_FACTORS} is not the scaling of Llama 3 (low_freq_factor {low}, high_freq_factor {high}, "
                f"original context {trained}), which is the one that is known"
            )
        return {
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": trained,
        }  # fmt: skip

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        """Further fields of Gemma 3: two kinds of layers with their own RoPE, and a scale of queries."""
        layers, head = config["num_hidden_layers"], config["head_dim"]
        scaled_by = GEMMA_27B[1] if layers == GEMMA_27B[0] else head
        if isinstance(self._get("attention.sliding_window_pattern"), list):
            raise self._wrong("attention.sliding_window_pattern is a list: not supported")
        every = self._size("attention.sliding_window_pattern", 6)
        near = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base_swa", 10000.0),
        }
        kinds = [
            "sliding_attention" if (n + 1) % every else "full_attention" for n in range(layers)
        ]
        return {
            "query_pre_attn_scalar": scaled_by, "sliding_window": self._size("attention.sliding_window"),
            "layer_types": kinds,
            "rope_parameters": {"full_attention": self._rope(config), "sliding_attention": near},
            "final_logit_softcapping": self._cap("final_logit_softcapping"),
            "attn_logit_softcapping": self._cap("attn_logit_softcapping"),
        }  # fmt: skip

    def state(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every weight by Hugging Face's name, dequantized.

        Raises CheckpointError for an unknown tensor, or fewer layers than the file says.
        """
        self._check_layers()
        return dict(self._weights(dtype))

    def _weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            if name != ROPE_FACTORS:
                values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
                wanted = self._name(name)
                yield wanted, torch.from_numpy(np.array(self._plain(wanted, values))).to(dtype)

    def _name(self, name: str) -> str:
        block = GEMMA_BLOCK if self.architecture == "gemma3" else BLOCK
        stem, _, ending = name.rpartition(".")
        parts = stem.split(".")
        found = WHOLE.get(stem)
        if len(parts) == 3 and parts[0] == "blk" and parts[2] in block:
            found = f"model.layers.{parts[1]}.{block[parts[2]]}"
        if found is None or ending not in ("weight", "bias"):
            raise self._wrong(f"it holds a tensor {name[:200]!r}, whose place is not known")
        return f"{found}.{ending}"

    def _plain(self, name: str, values: np.ndarray) -> np.ndarray:
        """Values as in Hugging Face's checkpoints."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        if self.architecture == "gemma3" and name.endswith("norm.weight"):
            return values - 1
        role = name.split(".")[-2]
        if self.architecture == "llama" and role in heads:
            count = self.config[heads[role]]
            if len(values) % (2 * count):
                raise self._wrong(
                    f"{name} has {len(values)} rows, which {count} heads do not share evenly"
                )
            turned = values.reshape(count, -1, 2, *values.shape[1:]).swapaxes(1, 2)
            return turned.reshape(values.shape)
        return values


def _reader(gguf: Any, path: Path) -> Any:
    """A reader that raises at the file's end, where gguf's own goes on with empty values, to any length."""

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, **order: Any) -> Any:
            if len(values := super()._get(offset, dtype, count, **order)) < count:
                raise ValueError(f"the file ends before the end of the value at byte {offset}")
            return values

    return Reader(path)


def _parts(reader: Any, name: str) -> list[np.ndarray]:
    """The parts of a list in a file; `contents` of a field is several times slower."""
    field = reader.fields.get(name)
    return [] if field is None else [field.parts[index] for index in field.data]


def _why_misread(reader: Any, parts: Any) -> str | None:
    """Why the gguf package would read a file without complaint, and wrongly; None if it would not.

    Args:
        reader: of the file.
        parts: of how many files it says that it is one.
    """
    if parts not in (None, 0, 1):
        return (
            f"it is one of {shown(parts)} parts of a model (split.count); merge them first, with "
            "llama-gguf-split --merge"
        )
    if reader.byte_order == "S":
        return "its byte order is not this machine's; files in that order are supported"
    start = int(reader.data_offset)
    for tensor in reader.tensors:
        if int(tensor.data_offset) != start:
            return (
                f"{shown(tensor.name)} begins at byte {tensor.data_offset}, and the tensor before it ends at {start}: "
                "the file is damaged"
            )
        start += -(-int(tensor.n_bytes) // reader.alignment) * reader.alignment
    return None
