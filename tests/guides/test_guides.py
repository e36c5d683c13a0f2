"""The guides' snippets run as they are written, with the demo models on the CPU."""

from __future__ import annotations

import pytest
import torch
from support import guide_snippets
from support.guide_snippets import run

from caramba_fast.config import KVCacheKind
from caramba_fast.config.spec import short_name
from caramba_fast.infer import GenerateConfig, Generator, SpeculativeGenerator
from caramba_fast.manifest import read_manifest, run_manifest
from caramba_fast.models import ModelConfig, Transformer, load_demo


@pytest.fixture(scope="module")
def small():
    """For what is measured many times: one narrow layer with the demo's vocabulary."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    return Transformer(config).eval()


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode("import os\n\ndef main():", return_tensors="pt")


# -- standard generation ------------------------------------------------------------------


def test_quick(small, ids):
    space = run(guide_snippets.QUICK, model=small, input_ids=ids)
    assert torch.equal(space["output_ids"][:, : ids.shape[1]], ids)
    assert 1 <= space["output_ids"].shape[1] - ids.shape[1] <= 128
    plan = space["generator"].cache_plan
    assert space["generator"].report["cache_kind"] == short_name(plan.spec)
    assert plan.spec in {row.spec for row in plan.rows}


def test_basic_usage(model, ids):
    space = run(guide_snippets.BASIC_USAGE, model=model, input_ids=ids)
    new = space["output_ids"][0, ids.shape[1] :].tolist()
    assert 1 <= len(new) <= 128 and 2 not in new[:-1]


def test_stateful_generator(model, ids, device):
    second = ids[:, 2:]
    space = run(
        guide_snippets.STATEFUL_GENERATOR,
        model=model,
        device=device,
        input_ids_1=ids,
        input_ids_2=second,
    )
    assert torch.equal(space["output2"][:, : second.shape[1]], second)
    assert space["generator"].cache is None


def test_continue_with_context_has_the_context(model, ids):
    """What follows is what a generator says that is given everything at once."""
    settings = dict(max_new_tokens=12, temperature=0.0, cache_kind="fp32", ignore_eos=True)
    generator = Generator(model, **settings)
    first, second = generator.generate(ids), generator.generate(ids[:, 2:])
    whole = Generator(model, **settings).generate(torch.cat((first, ids[:, 2:]), dim=1))
    assert torch.equal(torch.cat((first, second), dim=1), whole)


# -- caches -------------------------------------------------------------------------------


def test_configuring_cache():
    config = run(guide_snippets.CONFIGURING_CACHE)["config"]
    assert config == GenerateConfig(cache_kind="fp16", max_seq_len=4096)


def test_manual_cache(device):
    first, second = guide_snippets.MANUAL_CACHE.split("# Decoupled cache for DBA")
    imports = first.split("# Standard cache", maxsplit=1)[0]
    cache = run(first, device=device)["cache"]
    assert (cache.k.config.kind, cache.v.config.kind) == (KVCacheKind.Q8_0, KVCacheKind.FP16)
    assert cache.nbytes == 2048 * (256 * 8.5 / 8 + 256 * 2)
    cache.append(torch.randn(1, 3, 256), torch.randn(1, 3, 256))
    assert cache.attend(torch.randn(1, 4, 1, 256)).shape == (1, 4, 1, 256)
    decoupled = run(imports + second, device=device)["cache"]
    assert decoupled.nbytes == 2048 * (128 + 256 + 256) * 2
    decoupled.append(*(torch.randn(1, 3, width) for width in (128, 256, 256)))
    out = decoupled.attend(torch.randn(1, 4, 1, 128), torch.randn(1, 4, 1, 256))
    assert out.shape == (1, 4, 1, 256)
    run(guide_snippets.MANUAL_CACHE, device=device)


# -- the automatic choice -----------------------------------------------------------------


def test_auto(small, ids):
    config = run(guide_snippets.AUTO)["config"]
    generator = Generator(small, config)
    generator.generate(ids, max_new_tokens=2)
    assert generator.cache.nbytes <= 1024 * 2**20


def test_full_auto_measures_once(small, ids, tmp_path):
    config = run(guide_snippets.FULL_AUTO, folder=tmp_path)["config"]
    plans = []
    for _ in range(2):
        generator = Generator(small, config, max_new_tokens=2)
        generator.generate(ids)
        plans.append(generator.cache_plan)
    assert [plan.reused for plan in plans] == [False, True]
    assert plans[0].rows == plans[1].rows and plans[0].spec == plans[1].spec
    assert (tmp_path / "cache_plans.json").is_file()


def test_plan_persistence(small, ids, tmp_path):
    config = run(guide_snippets.PLAN_PERSISTENCE, folder=tmp_path)["config"]
    Generator(small, config, max_new_tokens=2).generate(ids)
    assert (tmp_path / "cache_plans.json").is_file()


# -- speculation --------------------------------------------------------------------------


def test_speculative(model, ids, capsys):
    names = dict(large_model=model, small_model=load_demo("dba"), input_ids=ids)
    space = run(guide_snippets.SPECULATIVE, **names)
    assert torch.equal(space["output"][:, : ids.shape[1]], ids)
    assert capsys.readouterr().out.startswith("Acceptance rate: ")
    assert 0 < space["generator"].acceptance_rate <= 1


def test_adaptive_speculative(model, ids):
    config = run(guide_snippets.ADAPTIVE_SPECULATIVE)["config"]
    greedy = dict(temperature=0.0, cache_kind="fp32", max_new_tokens=48)
    generator = SpeculativeGenerator(model, config=config, **greedy)
    assert torch.equal(generator.generate(ids), Generator(model, **greedy).generate(ids))
    assert config.spec_k_min <= generator.stats.spec_k <= config.spec_k_max


# -- decode plans -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["DECODE_PLANS", "DECODE_BUCKETS", "LONG_CONTEXT"])
def test_decode_plans(name, model, ids):
    config = run(getattr(guide_snippets, name))["config"]
    generator = Generator(model, config, max_new_tokens=4, temperature=0.0)
    out = generator.generate(ids)
    plain = Generator(model, cache_kind=config.cache_name, max_new_tokens=4, temperature=0.0)
    assert torch.equal(out, plain.generate(ids))  # no window where all is within reach
    reach = generator.report["decode_plan"]["reach"]
    assert set(reach) == {"short", "mid", "long"}
    windows = [reach[bucket]["local_window"] for bucket in ("short", "mid", "long")]
    assert windows == [512 if name == "DECODE_BUCKETS" else None, None, None]


# -- programs -----------------------------------------------------------------------------


def test_complete_pipeline(tokenizer, device, capsys):
    space = run(guide_snippets.COMPLETE_PIPELINE, tokenizer=tokenizer, device=device)
    assert capsys.readouterr().out.startswith("Once upon a time")
    assert space["output_ids"].shape[1] <= space["input_ids"].shape[1] + 256


def test_batch(model, tokenizer, capsys):
    config = GenerateConfig(max_new_tokens=8, temperature=0.0, cache_kind="fp32")
    space = run(guide_snippets.BATCH, tokenizer=tokenizer, generator=Generator(model, config))
    lines = capsys.readouterr().out
    for index, prompt in enumerate(space["prompts"]):
        alone = Generator(model, config).generate(tokenizer.encode(prompt, return_tensors="pt"))
        assert (
            tokenizer.decode(alone[0])
            in tokenizer.batch_decode(space["output_ids"], skip_special_tokens=True)[index]
        )
        assert f"Prompt {index}: " in lines


def test_streaming(model, tokenizer, device, capsys):
    config = GenerateConfig(max_new_tokens=12, temperature=0.0)
    run(guide_snippets.STREAMING, model=model, tokenizer=tokenizer, config=config, device=device)
    streamed = capsys.readouterr().out
    ids = tokenizer.encode("Hello", return_tensors="pt")
    whole = Generator(model, config).generate(ids)[0, ids.shape[1] :]
    assert streamed == tokenizer.decode(whole)


def test_manifest(tmp_path):
    manifest = read_manifest(guide_snippets.MANIFEST)
    config = manifest.targets[0].runs[0].config
    assert (config.max_new_tokens, config.temperature, config.cache_budget_mb) == (128, 0.8, 1024)
    small = guide_snippets.MANIFEST.replace("128", "4").replace("auto", "q8")
    (report,) = run_manifest(read_manifest(small), tmp_path)
    assert report.metrics["new_tokens"] <= 4 and report.texts
