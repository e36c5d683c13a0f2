"""RoPE, and attention, that change with the length of a text, in generators over models of transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.hf_matrix import (
    IS_OLD,
    greedy,
    longrope,
    new_model,
    stock,
)
from torch import Tensor

from caramba_fast.hf import HuggingFaceModel
from caramba_fast.infer import Generator, SpeculativeConfig, SpeculativeGenerator


def test_a_rope_that_turns_all_keys_otherwise_is_not_crossed() -> None:
    """Phi-3 reads its text anew there; keys of the cache would have the frequencies of a shorter text."""
    model = longrope(32)
    short, long = torch.arange(3, 31)[None], torch.arange(3, 43)[None]
    made = Generator(model, cache="fp32", temperature=0.0, ignore_eos=True)
    with pytest.raises(ValueError, match="more than 32 tokens, and the 32 in the cache"):
        made.generate(short, max_new_tokens=24)
    made.reset()
    made.prefill(long)
    made.rollback(7)  # 33 are left
    with pytest.raises(ValueError, match="turned as for 33: 25 of them cannot stay"):
        made.rollback(8)
    assert len(made.tokens[0]) == 33
    for ids, count in ((short, 4), (long, 24)):
        made.reset()
        wanted = model.generate(ids, max_new_tokens=count, do_sample=False)[:, ids.shape[1] :]
        assert torch.equal(made.generate(ids, max_new_tokens=count)[:, -count:], wanted)


def test_attention_that_is_scaled_by_the_longest_row_takes_equal_rows_alone() -> None:
    config = transformers.Llama4TextConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, intermediate_size_mlp=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2,
        attention_chunk_size=64, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], floor_scale=16, attn_scale=2.0,
        attn_temperature_tuning=True, tie_word_embeddings=False, initializer_range=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Llama4ForCausalLM(config).eval()
    long, short, brief = list(range(3, 43)), list(range(50, 60)), list(range(60, 65))
    made = Generator(model, cache="fp32")
    with pytest.raises(ValueError, match="attn_temperature_tuning"):
        made.prefill([long, short])
    rows = {}
    for prompts in ([short, brief], [short], [brief], [long, long[::-1]], [long]):
        made.reset()
        made.prefill(prompts)
        rows[len(rows)] = made.decode_step([5] * len(prompts))
    torch.testing.assert_close(rows[0], torch.cat([rows[1], rows[2]]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(rows[3][:1], rows[4], rtol=1e-3, atol=1e-4)
    alone = stock(
        model, [long, long[::-1]], 9
    )  # of rows of equal length one may end before the other
    ended = next(token for token in alone[0] if token not in alone[1])
    found = greedy(model, max_new_tokens=9).generate([long, long[::-1]], eos_token_id=ended)
    assert found[1, -9:].tolist() == alone[1]
    config.layer_types = ["full_attention"] * 2
    whole = HuggingFaceModel(transformers.Llama4ForCausalLM(config).eval())
    assert "attn_temperature_tuning" in (whole.why_not_ragged or "")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_length_takes_no_pass_that_would_depend_on_it(
    kind: str,
) -> None:
    factors = dict(short_factor=[1.0] * 8, long_factor=[3.0] * 8) if kind == "longrope" else {}
    rope = dict(rope_type=kind, factor=2.0, rope_theta=1e4, original_max_position_embeddings=32)
    model = new_model("llama", rope_parameters={**rope, **factors}, max_position_embeddings=32)
    long, short = torch.arange(3, 33).tolist(), [40, 41, 42]
    made = Generator(model, cache="fp32", temperature=0.0, max_new_tokens=12)
    with pytest.raises(ValueError, match="by the longest row from 32 tokens on"):
        made.generate([long, short])
    draft = SpeculativeConfig(spec_k=4, cache="fp32", temperature=0.0, max_new_tokens=12)
    with pytest.raises(ValueError, match=r"by the newest token from 32 .* without a draft"):
        SpeculativeGenerator(model, config=draft).generate([long])
    with pytest.raises(ValueError, match="prefill_chunk=None"):
        Generator(model, cache="fp32", prefill_chunk=12).generate([[*long, *long]])
    made.reset()  # rows of equal length, of which one ends before the other
    alone = stock(model, [long, long[::-1]], 12)
    if stock(model, [long, long[::-1]], 12) != alone:
        assert IS_OLD
        pytest.skip("this transformers never takes back the frequencies of a longer text")
    ended = alone[0][4]
    assert ended not in alone[1]
    found = made.generate([long, long[::-1]], eos_token_id=ended)[:, -12:].tolist()
    assert found[1] == alone[1]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rope_that_changes_with_the_length_is_that_of_the_text_that_is_left(kind: str) -> None:
    """Whatever longer text was taken back, and whatever the model has read before."""
    factors = dict(short_factor=[1.0] * 8, long_factor=[3.0] * 8) if kind == "longrope" else {}
    rope = dict(rope_type=kind, factor=2.0, rope_theta=1e4, original_max_position_embeddings=32)
    model = new_model("llama", rope_parameters={**rope, **factors}, max_position_embeddings=32)
    text = list(range(3, 90))

    def logits(first: int, held: int, left: int | None = None) -> Tensor:
        """Behind a prompt and steps up to ``held`` tokens, cut to ``left``, and two steps more."""
        made = Generator(model, cache="fp32")
        made.prefill([text[:first]])
        for token in text[first:held]:
            made.decode_step([token])
        left = held if left is None else left
        made.rollback(held - left)
        return torch.stack([made.decode_step([token]) for token in text[left : left + 2]])

    for first, left in ((40, 45), (20, 45), (20, 31), (20, 32)):
        wanted = logits(first, left)
        assert torch.equal(logits(first, 60, left), wanted)
        with torch.no_grad():
            model(torch.tensor([text]))
        assert torch.equal(logits(first, left), wanted)
    with pytest.raises(ValueError, match="as for 60: 25 of them cannot stay"):
        logits(60, 60, 25)
    if kind == "dynamic":  # the other has two ways alone
        with pytest.raises(ValueError, match="as for 60: 59 of them cannot stay; keep 60 or more"):
            logits(60, 65, 59)
    else:
        torch.testing.assert_close(logits(60, 60, 40), logits(40, 40), rtol=1e-4, atol=1e-4)
