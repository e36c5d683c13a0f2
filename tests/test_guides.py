"""The guide's snippets run as they are written, with the demo model on the CPU."""

import guide_snippets
import pytest
import torch

from caramba_fast.config import KVCacheKind
from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_path, load_demo

#: What a snippet says -> what it means here.
SUBSTITUTIONS = {
    'torch.device("mps")': "device",
    'device="mps"': "device=device",
    'load_model("path/to/checkpoint")': "load_demo()",
}


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(demo_path())


@pytest.fixture(scope="module")
def model():
    return load_demo()


def run(snippet, **names):
    for old, new in SUBSTITUTIONS.items():
        snippet = snippet.replace(old, new)
    space = {"torch": torch, "load_demo": load_demo, **names}
    exec(compile(snippet, "guide", "exec"), space)
    return space


@pytest.fixture
def ids(tokenizer):
    return tokenizer.encode("import os\n\ndef main():", return_tensors="pt")


def test_quick(model, ids):
    output = run(guide_snippets.QUICK, model=model, input_ids=ids)["output_ids"]
    assert torch.equal(output[:, : ids.shape[1]], ids)
    assert 1 <= output.shape[1] - ids.shape[1] <= 64


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


def test_configuring_cache():
    config = run(guide_snippets.CONFIGURING_CACHE)["config"]
    assert config == GenerateConfig(cache_kind="fp16", max_seq_len=4096)


def test_manual_cache(device):
    cache = run(guide_snippets.MANUAL_CACHE, device=device)["cache"]
    assert (cache.k.config.kind, cache.v.config.kind) == (KVCacheKind.Q8_0, KVCacheKind.FP16)
    assert cache.nbytes == 2048 * (256 * 8.5 / 8 + 256 * 2)
    cache.append(torch.randn(1, 3, 256), torch.randn(1, 3, 256))
    assert cache.attend(torch.randn(1, 4, 1, 256)).shape == (1, 4, 1, 256)


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
