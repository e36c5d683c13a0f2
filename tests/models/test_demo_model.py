"""The shipped demo models: they load everywhere, have learned something, and decode as they should."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from caramba_fast.cache import ModelKVCache
from caramba_fast.cli import demo as demo_command
from caramba_fast.config import cache_configs
from caramba_fast.infer import Generator
from caramba_fast.models import demo_path, demo_tokenizer, held_out_text, load_demo
from caramba_fast.ops import use_backend
from caramba_fast.quality import RecallFormat, compare_caches, draw_needles, retrieval_rate

NAMES = ("gqa", "dba")


@pytest.fixture(scope="module", params=NAMES)
def demo(request):
    return load_demo(request.param), demo_tokenizer(request.param)


@pytest.fixture(scope="module")
def held_out():
    return np.asarray(demo_tokenizer().encode(held_out_text()).ids)


def test_together_they_stay_small():
    files = [path for path in demo_path().parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16 * 10**6


@pytest.mark.parametrize("name", NAMES)
def test_the_card_says_what_was_measured(name):
    card = (demo_path(name) / "MODEL_CARD.md").read_text(encoding="utf-8")
    for part in ("bits/byte", "xz", "trigram", "distance in tokens", "| step |", "train_demo.py"):
        assert part in card


def test_the_gqa_model_is_a_hugging_face_checkpoint(held_out):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32)
    ids = torch.from_numpy(held_out[None, :300])
    with torch.no_grad():
        torch.testing.assert_close(load_demo()(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)
    text = held_out_text()[:2000]
    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    assert tokenizer.encode(text) == demo_tokenizer().encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_it_predicts_unseen_source_better_than_its_unigrams(demo, held_out):
    model, tokenizer = demo
    ids = np.asarray(tokenizer.encode(held_out_text()).ids)[:4096]
    nll = compare_caches(model, torch.from_numpy(ids.reshape(4, 1024)), ["fp32"])[0].nll
    counts = np.bincount(ids, minlength=model.vocab_size) / len(ids)
    unigram = -sum(p * math.log(p) for p in counts if p > 0)
    assert nll < 0.5 * unigram


def test_it_finds_what_it_read_1024_tokens_ago(demo):
    model, tokenizer = demo
    text = np.asarray(tokenizer.encode(held_out_text()).ids)
    needles = draw_needles(RecallFormat.of(tokenizer), text, 1024, 32)
    assert retrieval_rate(model, needles, "fp32") >= 0.5


def test_greedy_text_through_an_fp32_cache_equals_uncached_text(demo):
    model, tokenizer = demo
    ids = tokenizer.encode("import os\n\n\ndef main():\n").ids
    generator = Generator(model, cache_kind="fp32", temperature=0.0, max_new_tokens=40)
    cached = generator.generate([ids])[0].tolist()
    tokens = list(ids)
    while len(tokens) < len(cached):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert cached == tokens


def decoded_after(model, ids, kind, backend, prompt=256, step=8):
    """log-probabilities behind tokens fed ``step`` at a time, so that the decode kernels read them: (N, V)."""
    cache = ModelKVCache(model.cache_layout, 1, len(ids), **cache_configs(kind))
    row = torch.tensor([ids])
    with torch.no_grad(), use_backend(backend):
        model.forward(row[:, :prompt], cache)
        parts = [
            model.forward(row[:, start : start + step], cache)[0]
            for start in range(prompt, len(ids), step)
        ]
    return torch.cat(parts).double().log_softmax(-1)


def mean_kl(a, b):
    return float((a.exp() * (a - b)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["fp16", "q8:plain"])
def test_the_backend_in_use_says_what_the_reference_says(demo, held_out, kind):
    """Step by step, where no code of a later layer falls on the other side of a rounding: a KL below 1e-6."""
    model, _ = demo
    ids = held_out[:320].tolist()
    found, said = (
        decoded_after(model, ids, kind, backend, prompt=300, step=1)
        for backend in ("auto", "reference")
    )
    assert mean_kl(said, found) < 1e-6


@pytest.fixture(scope="module")
def exact(demo, held_out):
    """What an fp16 cache says of the tokens behind a prompt."""
    return decoded_after(demo[0], held_out[:768].tolist(), "fp16", "auto")


@pytest.mark.parametrize("kind", ["q8:plain", "q8", "q4:plain", "q4", "nf4"])
def test_the_arithmetic_costs_little_beside_the_cache(demo, held_out, exact, kind):
    """Against fp16 the cache costs what the reference says it does; what differs are codes of later layers that fall on
    the other side of a rounding, as any change of arithmetic makes them."""
    model, _ = demo
    ids = held_out[:768].tolist()
    found, said = (decoded_after(model, ids, kind, backend) for backend in ("auto", "reference"))
    cost = mean_kl(exact, said)
    assert mean_kl(said, found) < 0.1 * cost
    assert mean_kl(exact, found) < 1.1 * cost


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("kind", "rounding"), [("fp32", 1e-4), ("q4:plain", 2e-3), ("q4", 5e-3)])
def test_stored_prefill_does_not_depend_on_chunks(demo, held_out, kind, rounding, one_thread):
    """But for values that fall on the other side of a rounding, of which a tail and a rotation have more.

    In one thread: torch's products of several differ by 1e-6, and one code that becomes another moves a logit by 0.2.
    """
    model, _ = demo
    prompt = held_out[:300].tolist()
    settings = dict(cache_kind=kind, prefill="stored", max_new_tokens=1)
    whole = Generator(model, **settings).prefill([prompt])
    for chunk in (64, 37):
        pieces = Generator(model, **settings, prefill_chunk=chunk).prefill([prompt])
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=rounding)


@pytest.mark.parametrize("kind", ["q8", "q4", "nf4"])
def test_a_tail_and_sinks_lose_less(demo, kind, held_out):
    """Decoding with the newest 64 tokens and the first 8 in fp16 is closer to fp16 than without."""
    model, _ = demo
    prompt, rest = held_out[:400].tolist(), held_out[400:440].tolist()

    def logits(**settings):
        generator = Generator(model, prefill="exact", max_new_tokens=1, **settings)
        generator.prefill([prompt])
        return torch.cat([generator.decode_step([token]) for token in rest]).log_softmax(-1)

    base = logits(cache_kind="fp16")
    plain = logits(cache_kind=kind)
    helped = logits(cache_kind=kind, cache_residual_len=64, cache_sink_len=8)
    error = [float((x - base).abs().mean()) for x in (plain, helped)]
    assert error[1] < error[0]


def test_the_demo_command_measures_both_models(capsys, monkeypatch):
    monkeypatch.setattr(demo_command, "ROUNDS", 1)
    monkeypatch.setattr(demo_command, "NEEDLES", 4)
    rows = demo_command.run_demo(quality_tokens=1024, new_tokens=6)
    assert {name: [row.kind for row in found] for name, found in rows.items()} == {
        "gqa": ["fp16", "q8", "q4", "q4:plain", "nf4"],
        "dba": ["fp16", "q8", "q4", "q4:plain", "q4/q8/q4"],
    }
    bytes_of = {row.kind: row.metrics.bytes_per_token for row in rows["gqa"]}
    assert bytes_of == {"fp16": 2048, "q8": 1120, "q4": 608, "q4:plain": 576, "nf4": 608}
    for found in rows.values():
        assert found[0].quality.delta_nll == 0
        assert all(row.text and row.quality.ppl_ratio < 1.2 for row in found)
    printed = capsys.readouterr().out
    assert "16.0x" in printed and "perplexity" in printed


def test_configs_are_complete():
    for name in NAMES:
        config = json.loads((demo_path(name) / "config.json").read_text(encoding="utf-8"))
        assert config["max_position_embeddings"] == 2048 and config["vocab_size"] == 2048
