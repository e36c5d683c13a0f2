"""Generator: the tokens are the model's own; where a text ends, what each step yields, and what is measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generators import (
    MORE,
    PAD,
    VOCABULARY,
    A,
    B,
    C,
    an_eos_for,
    front,
    greedy,
    new_model,
    new_tokens,
    uncached,
)

import caramba_fast
from caramba_fast.config.spec import DEFAULTS
from caramba_fast.infer import GenerateConfig, Generator, generate
from caramba_fast.infer.run import Stopwatch
from caramba_fast.models import Transformer, demo_tokenizer, load_demo
from caramba_fast.serve import Engine


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


# -- greedy, alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["exact", "stored"])
@pytest.mark.parametrize("prompt", [A, B, C, [7]], ids=len)
def test_greedy_from_an_fp32_cache_equals_whole_forward_passes(
    model: Transformer, prompt: list[int], prefill: str
) -> None:
    out = greedy(model, max_new_tokens=20, prefill=prefill).generate([prompt])
    assert out.tolist() == [prompt + uncached(model, prompt, 20)]


@pytest.mark.parametrize("prefill", ["exact", "stored"])
def test_every_cache_kind_runs(model: Transformer, kind: str, prefill: str) -> None:
    generator = greedy(model, cache_kind=kind, prefill=prefill)
    out = generator.generate([A, B])
    assert out.shape == (2, len(A) + 6)
    assert out.dtype == torch.int64
    assert generator.cache is not None
    keys = DEFAULTS.get(kind, {}).get("k", {}).get("kind", kind)
    assert [layer.k.config.kind for layer in generator.cache] == [keys, keys]
    assert [layer.v.config.kind.value for layer in generator.cache] == [kind, kind]


@pytest.mark.parametrize(("alias", "kind"), [("q8", "q8_0"), ("q4", "q4_0"), ("Q4", "q4_0")])
def test_aliases_name_the_same_kind(model: Transformer, alias: str, kind: str) -> None:
    assert Generator(model, cache_kind=alias).config.cache_kind.value == kind


def test_smaller_kinds_take_fewer_bytes(model: Transformer) -> None:
    sizes = {}
    for kind in ("fp32", "fp16", "q8_0", "q4_0"):
        generator = greedy(model, cache_kind=kind)
        generator.generate([A])
        assert generator.metrics is not None
        sizes[kind] = generator.metrics.bytes_per_token
    values = 2 * 2 * 2 * 16
    assert sizes == {k: values * b / 8 for k, b in zip(sizes, (32, 16, 8.75, 4.75), strict=True)}


def test_a_sliding_window_is_kept_over_turns(device: torch.device) -> None:
    model = new_model(device, model_type="mistral", sliding_window=4)
    generator = greedy(model, max_new_tokens=10)
    first = generator.generate([C])[0].tolist()
    assert first == C + uncached(model, C, 10)
    assert new_tokens(generator.generate([MORE]), 10) == [uncached(model, first + MORE, 10)]


def test_the_stateless_function_starts_anew_each_time(model: Transformer) -> None:
    expected = [A + uncached(model, A, 4)]
    for _ in range(2):
        out = generate(model, [A], 4, temperature=0.0, cache_kind="fp32", max_seq_len=64)
        assert out.tolist() == expected
    config = GenerateConfig(temperature=0.0, cache_kind="fp32", max_new_tokens=9)
    assert caramba_fast.generate(model, [A], config=config, max_new_tokens=4).tolist() == expected


@pytest.mark.parametrize(
    "shape",
    [lambda a: a, lambda a: [a], torch.tensor, lambda a: torch.tensor([a], dtype=torch.int32)],
    ids=["list", "nested list", "1-d tensor", "2-d int32"],
)
def test_a_single_prompt_may_come_in_any_shape(
    model: Transformer, shape: Callable[[list[int]], Any]
) -> None:
    assert greedy(model).generate(shape(A)).tolist() == [A + uncached(model, A)]


def test_text_is_a_prompt_where_there_is_a_tokenizer() -> None:
    model, tokenizer = load_demo(), demo_tokenizer()
    given: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 3, "max_seq_len": 64}
    texts = ["import os\n", "def read("]
    ids = [tokenizer.encode(text).ids for text in texts]
    made = Generator(model, tokenizer=tokenizer, **given)
    wanted = Generator(model, **given).generate(ids)
    assert torch.equal(made.generate(texts), wanted)
    made.reset()
    assert made.generate(texts[0]).tolist() == Generator(model, **given).generate(ids[0]).tolist()
    with pytest.raises(TypeError, match="text, which needs Generator"):
        Generator(model, **given).generate("import os")
    with pytest.raises(ValueError, match="attention_mask is given and input_ids is text"):
        made.generate("import os", [[1]])
    with pytest.raises(TypeError, match="input_ids is a bytes; a tensor, lists of token ids"):
        made.generate(b"import os")  # type: ignore[arg-type]


def test_rows_beyond_the_positions_of_a_model_are_warned_of(model: Transformer) -> None:
    most = model.trained_positions
    assert most == model.config.max_position_embeddings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy(model, max_seq_len=most + 9).generate([A], max_new_tokens=2)
    made = greedy(model, max_seq_len=most + 9)
    made.generate([A], max_new_tokens=2)
    with pytest.warns(
        UserWarning, match=f"beyond the {most} positions that the model was made for"
    ):
        made.generate_iter([B], max_new_tokens=most - len(A) - len(B))
    engine = Engine(model, cache="q8", num_pages=64, max_seq_len=most + 100)
    with pytest.warns(UserWarning, match=f"beyond the {most} positions"):
        engine.add_request(A, max_new_tokens=most + 2 - len(A))


def test_choosing_a_cache_is_no_part_of_the_first_token(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    made, resume = greedy(model), Stopwatch.resume
    new_cache = made._session._new_cache
    monkeypatch.setattr(
        made._session, "_new_cache", lambda rows: seen.append("cache") or new_cache(rows)
    )
    monkeypatch.setattr(Stopwatch, "resume", lambda self: seen.append("clock") or resume(self))
    made.generate([A], max_new_tokens=1)
    assert seen[:3] == ["clock", "cache", "clock"]


def test_no_gradient_is_recorded(model: Transformer) -> None:
    with torch.enable_grad():
        generator = greedy(model)
        assert not generator.prefill([A]).requires_grad
        for _ in generator.generate_iter([B]):
            assert torch.is_grad_enabled()
        assert not generator.decode_step([4]).requires_grad


def test_a_conversation_begun_in_inference_mode_goes_on_outside_it(model: Transformer) -> None:
    generator = greedy(model)
    with torch.inference_mode():
        history = generator.generate([A])[0].tolist()
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


# -- the end of a text -----------------------------------------------------------------------


def test_any_of_several_eos_ids_ends_a_row(model: Transformer) -> None:
    path = uncached(model, A, 12)
    unused = next(i for i in range(VOCABULARY) if i not in path)
    out = greedy(model, max_new_tokens=12, eos_token_id=[unused, path[3]]).generate([A])
    assert out[0, len(A) :].tolist() == path[: path.index(path[3]) + 1]


def test_every_eos_id_of_the_checkpoint_ends_a_row(
    device: torch.device, model: Transformer
) -> None:
    path = uncached(model, A, 12)
    unused = next(i for i in range(VOCABULARY) if i not in path)
    named = new_model(device, eos_token_id=(unused, path[3]))
    out = greedy(named, max_new_tokens=12).generate([A])
    assert out[0, len(A) :].tolist() == path[: path.index(path[3]) + 1]


def test_the_eos_id_of_the_model_is_the_default(device: torch.device, model: Transformer) -> None:
    path = uncached(model, A, 12)
    named = new_model(device, eos_token_id=path[3])
    assert greedy(named, max_new_tokens=12).generate([A])[0, -1] == path[3]
    whole = greedy(named, max_new_tokens=12, ignore_eos=True).generate([A])
    assert whole[0, len(A) :].tolist() == path


def test_eos_id_0_counts(device: torch.device, model: Transformer) -> None:
    steps = 40
    named = new_model(device, eos_token_id=0)
    with torch.no_grad():
        named.lm_head.weight[0] = named.lm_head.weight[uncached(named, A, 3)[2]] * 1.5
    path = uncached(named, A, steps)
    assert 0 in path
    out = greedy(named, max_new_tokens=steps).generate([A])
    assert out[0, len(A) :].tolist() == path[: path.index(0) + 1]


@pytest.mark.parametrize("source", ["config", "model"])
def test_an_empty_list_of_eos_ids_never_ends_a_row(
    device: torch.device, model: Transformer, source: str
) -> None:
    named = new_model(device, eos_token_id=() if source == "model" else 3)
    settings = {"eos_token_id": []} if source == "config" else {}
    assert greedy(named, **settings).generate([A]).tolist() == [A + uncached(model, A)]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_new_tokens_is_kept(model: Transformer, count: int) -> None:
    out = greedy(model, max_new_tokens=count).generate([A, B])
    assert out.shape == (2, len(A) + count)


@pytest.mark.parametrize("pad", [-1, VOCABULARY])
def test_a_padding_id_of_the_checkpoint_outside_the_vocabulary(
    device: torch.device, model: Transformer, pad: int
) -> None:
    """Old Llama folders say -1: either it is refused by name, or it does no harm."""
    named = new_model(device, pad_token_id=pad)
    try:
        generator = greedy(named)
    except ValueError as error:
        assert "pad_token_id" in str(error)
        return
    assert new_tokens(generator.generate([A, B]), 6) == [uncached(model, A), uncached(model, B)]


# -- step by step ----------------------------------------------------------------------------


def test_generate_iter_yields_ints_for_one_row(model: Transformer) -> None:
    steps = list(greedy(model).generate_iter([A]))
    assert all(type(step) is int for step in steps)
    assert steps == uncached(model, A)


def test_generate_iter_yields_a_tensor_of_rows_for_a_batch(model: Transformer) -> None:
    eos = an_eos_for(model, A, [B], 12)
    settings = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": PAD}
    steps = list(greedy(model, **settings).generate_iter([A, B]))
    assert all(s.shape == (2,) and s.dtype == torch.int64 and s.device.type == "cpu" for s in steps)
    whole = greedy(model, **settings).generate([A, B])
    assert torch.stack(steps, 1).tolist() == new_tokens(whole, 12)


def test_bad_input_raises_when_generate_iter_is_called(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=10)
    for wrong in ([[]], [[VOCABULARY]], [list(range(11))]):
        with pytest.raises(ValueError):
            generator.generate_iter(wrong)


# -- sampling --------------------------------------------------------------------------------


def sampled(model: Transformer, **settings: Any) -> list[list[int]]:
    generator = greedy(model, temperature=1.0, max_new_tokens=12, **settings)
    return generator.generate([A, B]).tolist()


def test_a_seed_repeats_and_another_seed_differs(model: Transformer) -> None:
    assert sampled(model, seed=4) == sampled(model, seed=4)
    assert sampled(model, seed=4) != sampled(model, seed=5)


def test_a_seed_does_not_touch_the_global_generator(model: Transformer) -> None:
    state = torch.get_rng_state()
    first = sampled(model, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert sampled(model, seed=4) == first


def test_without_a_seed_the_global_generator_decides(model: Transformer) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(8)
        runs.append(sampled(model))
    assert runs[0] == runs[1] != sampled(model)


def test_rows_of_a_batch_draw_on_their_own(model: Transformer) -> None:
    out = greedy(model, temperature=1.5, seed=0, max_new_tokens=12).generate([A] * 4)
    assert len({tuple(row) for row in out.tolist()}) == 4


def test_top_k_1_is_greedy(model: Transformer) -> None:
    out = greedy(model, temperature=2.0, top_k=1).generate([A])
    assert out.tolist() == [A + uncached(model, A)]


# -- metrics ---------------------------------------------------------------------------------


def test_metrics_count_real_tokens(model: Transformer) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos, pad_token_id=PAD)
    generator.generate(torch.tensor(front([A, B])))
    m, cache = generator.metrics, generator.cache
    assert m is not None
    assert cache is not None
    assert m.prompt_tokens == len(A) + len(B)
    assert m.new_tokens == uncached(model, A, 12).index(eos) + 1 + 12
    assert m.cache_bytes == cache.nbytes == sum(layer.nbytes for layer in cache)
    assert m.bytes_per_token == cache.nbytes / (2 * 128)
    assert 0 < m.ttft_s <= m.total_s
    assert 0 < m.inter_token_p50_s <= m.inter_token_p99_s <= m.total_s
    assert m.tokens_per_s == pytest.approx(m.new_tokens / m.total_s)
    assert m.decode_tokens_per_s > 0
    assert m.as_dict()["new_tokens"] == m.new_tokens


def test_metrics_of_a_second_call_are_its_own(model: Transformer) -> None:
    generator = greedy(model, max_new_tokens=3)
    generator.generate([A])
    first = generator.metrics
    generator.generate([MORE])
    assert generator.metrics is not first
    assert generator.metrics is not None
    assert (generator.metrics.prompt_tokens, generator.metrics.new_tokens) == (len(MORE), 3)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_the_time_to_the_first_token_has_the_prompt(
    num_beams: int, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Transformer.forward

    def slow(self: Transformer, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.2 if tokens.shape[1] > 1 else 0)
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(Transformer, "forward", slow)
    generator = greedy(model, max_new_tokens=3, num_beams=num_beams)
    generator.generate([A])
    assert generator.metrics is not None
    assert generator.metrics.ttft_s > 0.2 > generator.metrics.inter_token_p50_s


def test_one_token_has_no_time_between_tokens(model: Transformer) -> None:
    generator = greedy(model, max_new_tokens=1)
    generator.generate([A])
    assert generator.metrics is not None
    assert generator.metrics.inter_token_p50_s != generator.metrics.inter_token_p50_s
    assert generator.metrics.ttft_s == generator.metrics.total_s
