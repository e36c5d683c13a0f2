"""The guide to small inference modules (text in, text out) and the page of the inferencer protocols.

Their listings of original code are covered by what they are said to do.
"""

import inspect
import math
import textwrap
from collections import Counter

import pytest
import torch
from support import guide_snippets
from support.guide_snippets import run

from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.infer import GenerateConfig, Generator, inferencer
from caramba_fast.infer.inferencer import CausalInferencer
from caramba_fast.infer.kv_cache import QuantizedKVCache
from caramba_fast.inference.generate import Generator as TextGenerator
from caramba_fast.inference.generate import main
from caramba_fast.inference.sampling import apply_temperature, sample_top_p
from caramba_fast.models import demo_path

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5])
NUCLEUS = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02])


@pytest.fixture(scope="module")
def gen():
    return TextGenerator(demo_path(), demo_path())


# -- sampling -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "scaled", "printed"),
    [
        (0.5, [4.0, 3.0, 2.0, 1.0], [0.64, 0.24, 0.09, 0.03]),
        (1.0, [2.0, 1.5, 1.0, 0.5], [0.42, 0.26, 0.16, 0.10]),
        (2.0, [1.0, 0.75, 0.5, 0.25], [0.30, 0.23, 0.18, 0.14]),
    ],
)
def test_temperature(temperature, scaled, printed):
    """The guide's last two rows add up to less than 1; their proportions are right."""
    found = apply_temperature(LOGITS, temperature)
    torch.testing.assert_close(found, torch.tensor(scaled))
    normalized = torch.tensor(printed) / sum(printed)
    torch.testing.assert_close(found.softmax(-1), normalized, atol=0.012, rtol=0)


def test_temperature_0_does_not_divide_by_it():
    assert apply_temperature(LOGITS, 0.0).isfinite().all()
    assert apply_temperature(LOGITS, 0.0).argmax() == 0


def test_top_p_samples_from_the_four_of_the_example():
    """The listing keeps a fifth token where rounding allows; the example says which four."""
    probs, rng = NUCLEUS.expand(4000, -1), torch.Generator().manual_seed(0)
    before = probs.clone()
    drawn = Counter(sample_top_p(probs, 0.9, generator=rng)[:, 0].tolist())
    assert set(drawn) == {0, 1, 2, 3}
    for token, share in enumerate((NUCLEUS[:4] / 0.9).tolist()):
        assert abs(drawn[token] / 4000 - share) < 5 * math.sqrt(share / 4000)
    assert torch.equal(probs, before)


def test_top_p_in_a_generation_keeps_the_same_four(model):
    from caramba_fast.infer.sampling import filtered_logits

    kept = filtered_logits(NUCLEUS.double().log(), GenerateConfig(top_p=0.9)).isfinite()
    assert kept.tolist() == [True] * 4 + [False] * 3


# -- the generator ------------------------------------------------------------------------


def test_basic_generation(device, capsys):
    output = run(guide_snippets.TEXT_GENERATION, device=device)["output"]
    assert output.startswith("Once upon a time")
    assert capsys.readouterr().out.strip() == output.strip()


def test_command_line(capsys):
    main(["--max-new-tokens", "4", "--seed", "0"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Loading Tokenizer from ") and lines[1].startswith(
        "Loading Checkpoint from "
    )
    assert lines[2:6] == ["Generator Ready.", "", "Prompt: Hello world", "-" * 30]
    assert lines[6].startswith("Hello world") and lines[-1] == "-" * 30


def test_streaming(model, tokenizer, capsys):
    generator = Generator(model, max_new_tokens=8, temperature=0.0)
    run(
        guide_snippets.TEXT_STREAMING,
        generator=generator,
        tokenizer=tokenizer,
        prompt="def main():",
    )
    assert capsys.readouterr().out == tokenizer.decode(generator.tokens[0])[len("def main():") :]


def test_streaming_of_text(gen):
    settings = dict(max_new_tokens=8, temperature=0.0)
    pieces = list(gen.generate_stream("def main():", **settings))
    assert len(pieces) > 1
    assert "def main():" + "".join(pieces) == gen.generate("def main():", **settings)


def test_batch(gen):
    outputs = run(guide_snippets.TEXT_BATCH, gen=gen)["outputs"]
    assert [out[:3] for out in outputs] == ["Hel", "How", "The"]
    settings = dict(max_new_tokens=8, temperature=0.0)
    alone = [gen.generate(prompt, **settings) for prompt in ("Hello", "How are", "The cat")]
    assert gen.generate_batch(["Hello", "How are", "The cat"], 2, **settings) == alone


def test_early_stopping(model, tokenizer):
    """The loop of the guide ends where the generator ends by itself."""
    eos = tokenizer.eos_token_id
    steps = Generator(
        model, logit_bias={eos: 4.0}, max_new_tokens=64, temperature=0.0, cache_kind="fp32"
    )
    prompt = tokenizer.encode("def main():", return_tensors="pt")
    tokens = list(steps.generate_iter(prompt))
    steps.reset()
    body = textwrap.indent(f"seen.append(int(next_token))\n{guide_snippets.EARLY_STOPPING}", "    ")
    loop = f"for next_token in map(torch.tensor, steps):\n{body}"
    seen = run(
        loop, steps=steps.generate_iter(prompt, ignore_eos=True), seen=[], tokenizer=tokenizer
    )["seen"]
    assert seen == tokens


@pytest.mark.parametrize("advice", guide_snippets.ADVICE)
def test_advice(advice, gen):
    settings = {k: v for k, v in run(advice).items() if k in ("temperature", "top_p")}
    assert gen.generate("def", max_new_tokens=2, **settings).startswith("def")


def test_each_step_caches_what_it_was_given(model, tokenizer):
    """The step-by-step example: first the prompt, then one token a step."""
    generator = Generator(model, temperature=0.0, max_new_tokens=8)
    prompt = tokenizer.encode("The cat", return_tensors="pt")
    steps = generator.generate_iter(prompt, ignore_eos=True)
    assert [generator.cache.pos - prompt.shape[1] for _ in steps] == list(range(8))


def test_size_of_the_example():
    """2 × 16 × 512 × 6 × 64 × 2 bytes."""
    layout = [LayerShape(6 * 64, 6 * 64, 6)] * 16
    cache = ModelKVCache(layout, 1, 512, device="meta", **cache_configs("bf16"))
    assert cache.nbytes == 2 * 16 * 512 * 6 * 64 * 2 == 12_582_912


# -- the inferencer protocols ---------------------------------------------------------------


def test_protocol_names():
    for name in ("LanguageModel", "Inferencer", "KVCache", "PrefillOutput", "DecodeOutput"):
        assert hasattr(inferencer, name)
    assert inferencer.KVState._fields == ("keys", "values")
    assert inferencer.PrefillOutput._fields == ("token_ids", "token_logits")
    assert inferencer.DecodeOutput._fields == ("token_ids", "token_logits")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (CausalInferencer.prefill, ["query_token_ids", "kv_cache", "sample_strategy"]),
        (
            CausalInferencer.decode,
            ["query_token_ids", "kv_cache", "max_new_tokens", "sample_strategy"],
        ),
        (QuantizedKVCache.update, ["kv_states"]),
        (QuantizedKVCache.crop, ["num_tokens_crop"]),
        (QuantizedKVCache.get_kv_states, []),
        (QuantizedKVCache.get_num_tokens, []),
        (inferencer.LanguageModel.forward, ["query_token_ids", "kv_cache"]),
    ],
)
def test_protocol_signatures(method, parameters):
    found = [
        name for name, p in inspect.signature(method).parameters.items() if p.kind != p.KEYWORD_ONLY
    ]
    assert found[1:] == parameters
