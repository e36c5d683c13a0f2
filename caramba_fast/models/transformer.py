"""Transformer: a small Llama-family decoder whose attention reads caramba_fast caches.

Parameter names are Hugging Face's (``model.layers.0.self_attn.q_proj.weight``), so checkpoints of Llama, Mistral,
Qwen2 and Qwen3 load as they are. Nothing here depends on a storage format.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba_fast.cache import (
    AnyLayerShape,
    DecodeBatch,
    DecoupledLayerShape,
    LayerCache,
    LayerShape,
    ModelKVCache,
    RaggedBatch,
)
from caramba_fast.models.attention import Attention, DecoupledAttention, Step
from caramba_fast.models.config import ModelConfig
from caramba_fast.models.merged import MergedLinear, Projecting, split_projections
from caramba_fast.models.query_rms import with_query_rms
from caramba_fast.models.rope import RopeTable


class MLP(Projecting):
    """SwiGLU (arXiv:2002.05202)."""

    gate_up_proj: MergedLinear  # replaces gate_proj and up_proj if they were merged

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden)."""
        if "gate_up_proj" in self._modules:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        if torch.is_grad_enabled():
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(gate, inplace=True).mul_(up))  # without new memory


class Block(nn.Module):
    """Pre-norm attention, then pre-norm MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = (
            Attention(config) if config.decoupled is None else DecoupledAttention(config)
        )
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step, cache: LayerCache | None) -> Tensor:
        """x (B, T, hidden) -> (B, T, hidden) of the needed rows."""
        x = step.wanted(x) + self.self_attn(self.input_layernorm(x), step, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Embedding):
    """Not initialised on the meta device: there torch would import its compiler for it, which takes seconds."""

    def reset_parameters(self) -> None:
        """As torch's, where there is memory."""
        if not self.weight.is_meta:
            super().reset_parameters()


class Decoder(nn.Module):
    """Embedding, blocks and final norm; Hugging Face's ``model``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def check_dtype(dtype: torch.dtype) -> None:
    """Raises TypeError for weights of a dtype that the ops do not support."""
    if dtype == torch.float64:
        raise TypeError(
            "the model's weights are float64; float32, float16 and bfloat16 are allowed: model.float()"
        )


class Transformer(nn.Module):
    """The native language model; satisfies `caramba_fast.models.LanguageModel`.

    Args:
        config: sizes and features; the weights are random until others are loaded.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rope = RopeTable(config.rope, config.rope_dim)
        if not self.lm_head.weight.is_meta:
            self.apply(self._initialise)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def split_projections(self) -> None:
        """As `caramba_fast.models.split_projections`, for lower layers that must not import it."""
        split_projections(self)

    @property
    def eos_token_id(self) -> int | None:
        """End-of-sequence id, the first if there are several."""
        return next(iter(self.eos_token_ids), None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids of the checkpoint."""
        eos = self.config.eos_token_id
        return (eos,) if isinstance(eos, int) else tuple(eos or ())

    @property
    def pad_token_id(self) -> int | None:
        """Padding id of the checkpoint, or None."""
        return self.config.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def trained_positions(self) -> int:
        """Longest text, in tokens, that the model was trained for."""
        return self.config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.lm_head.weight.device

    @property
    def cache_layout(self) -> list[AnyLayerShape]:
        """Shape of each layer's cache."""
        config, heads = self.config, self.config.num_key_value_heads
        if config.decoupled is not None:
            dims, group = config.decoupled, config.num_attention_heads // heads
            widths = (dims.sem_dim // group, dims.geo_dim // group, dims.v_dim // group)
            shape: AnyLayerShape = DecoupledLayerShape(*widths, heads)
        else:
            shape = LayerShape(heads * config.head_dim, heads * config.head_dim, heads)
        return with_query_rms(self, [shape] * config.num_hidden_layers)

    def forward(
        self,
        query_token_ids: Tensor,
        kv_cache: ModelKVCache | None = None,
        *,
        query_lens: Sequence[int] | None = None,
        logits_index: Tensor | None = None,
    ) -> Tensor:
        """Logits after each query token; each row of the cache, if given, grows by its real tokens.

        Args:
            query_token_ids: (B, T) int64, the tokens after those in ``kv_cache``.
            kv_cache: caches of all layers, or None: the query tokens attend only to each other.
            query_lens: number of real tokens of each row; the rest is padding, whose logits are meaningless. By
                default all are real.
            logits_index: (B,) int64; compute logits at this position of each row only, instead of T × vocabulary.

        Returns:
            (B, T, V) logits in the weights' dtype, or (B, 1, V) with ``logits_index``.

        Raises:
            ValueError, OutOfPagesError: the cache has no room for the tokens; it is as it was.
            TypeError: the weights are float64.
        """
        batch, length = query_token_ids.shape
        steps = torch.arange(length, device=query_token_ids.device)
        if kv_cache is None:
            positions, exact = steps.expand(batch, length), False
        else:
            held = kv_cache.layers[0].lengths
            positions = held.seq_lens[:, None] + steps
            exact = kv_cache.prefill == "exact" and not any(held.host)
        x = self.model.embed_tokens(query_token_ids)
        step = Step(self._phases(positions, x.dtype), exact, query_lens)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, step, None if kv_cache is None else kv_cache.layers[index])
        if logits_index is not None:
            x = x[torch.arange(batch, device=x.device), logits_index][:, None]
        return self.lm_head(self.model.norm(x))

    def _phases(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of positions (B, T), computed once for all layers."""
        check_dtype(dtype)
        cos, sin = self.rope(positions)
        return cos.to(dtype), sin.to(dtype)

    def forward_ragged(self, ids: Tensor, batch: RaggedBatch | DecodeBatch, rows: Tensor) -> Tensor:
        """Processes tokens of many sequences and appends them to the pages of ``batch``.

        Args:
            ids: (N,) int64.
            batch: the sequence and position of each token.
            rows: (M,) int64, the tokens after which logits are needed.

        Returns:
            (M, V) logits.
        """
        x = self.model.embed_tokens(ids)[:, None]
        step = Step(self._phases(batch.positions[:, None], x.dtype), False, None)
        *before, last = self.model.layers
        for layer, cache in zip(before, batch.layers, strict=False):
            x = layer(x, step, cache)
            cache.release()
        if isinstance(batch, RaggedBatch) and len(rows) < len(ids):
            x = last(x, step._replace(rows=rows), batch.narrowed(rows))
        else:
            x = last(x, step, batch.layers[-1])[rows]
            batch.layers[-1].release()
        return self.lm_head(self.model.norm(x))[:, 0]
