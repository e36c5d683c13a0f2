"""Generator: the tokens are the model's own, whatever the turns, the batch, the breaks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

import caramba_fast
from caramba_fast.config.spec import DEFAULTS
from caramba_fast.infer import GenerateConfig, Generator, generate
from caramba_fast.models import ModelConfig, Transformer

VOCABULARY = 61
CONFIG = ModelConfig(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    initializer_range=0.3,
)
A, B, C = [3, 14, 15, 9, 26], [5, 35, 8], [9, 7, 9, 3, 2, 38, 4, 6]
MORE, REST = [27, 18, 28], [45, 9]
PAD = 60


def new_model(device: torch.device, **changes: Any) -> Transformer:
    torch.manual_seed(11)
    return Transformer(CONFIG.model_copy(update=changes)).to(device).eval()


@pytest.fixture(scope="module")
def model(device: torch.device) -> Transformer:
    return new_model(device)


def greedy(model: Transformer, **settings: Any) -> Generator:
    defaults = {"temperature": 0.0, "cache_kind": "fp32", "max_new_tokens": 6, "max_seq_len": 128}
    return Generator(model, **{**defaults, **settings})


@torch.no_grad()
def uncached(model: Transformer, ids: Sequence[int], steps: int = 6) -> list[int]:
    """Greedy tokens from whole forward passes."""
    row = list(ids)
    for _ in range(steps):
        row.append(int(model(torch.tensor([row], device=model.device))[0, -1].argmax()))
    return row[len(ids) :]


@torch.no_grad()
def next_logits(model: Transformer, history: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(history)], device=model.device))[0, -1]


def new_tokens(out: Tensor, count: int) -> list[list[int]]:
    return out[:, out.shape[1] - count :].tolist()


def an_eos_for(model: Transformer, first: list[int], others: list[list[int]], steps: int) -> int:
    """A token ``first`` reaches early and the others not at all."""
    taken = {token for row in others for token in uncached(model, row, steps)}
    path = uncached(model, first, steps)
    eos = next(token for token in path[1:] if token not in taken)
    assert path.index(eos) < steps - 2
    return eos


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


# -- turns -----------------------------------------------------------------------------------


def test_a_second_call_continues_the_first(model: Transformer) -> None:
    generator = greedy(model)
    first = generator.generate([A])[0].tolist()
    second = generator.generate([MORE])[0].tolist()
    assert second == MORE + uncached(model, first + MORE)
    third = generator.generate([REST])[0].tolist()
    assert third == REST + uncached(model, first + second + REST)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 8, 11])
def test_rollback_with_a_pending_token(model: Transformer, n: int) -> None:
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    generator.rollback(n)
    history = history[: len(history) - n]
    out = generator.generate([MORE])[0].tolist()
    assert out == MORE + uncached(model, history + MORE)


@pytest.mark.parametrize("n", [0, 1, 4, 5])
def test_rollback_without_a_pending_token(model: Transformer, n: int) -> None:
    generator = greedy(model)
    generator.prefill([A])
    generator.rollback(n)
    out = generator.generate([MORE])[0].tolist()
    assert out == MORE + uncached(model, A[: len(A) - n] + MORE)


@pytest.mark.parametrize("counts", [[4, 0], torch.tensor([4, 0])], ids=["list", "tensor"])
def test_rollback_of_single_rows(model: Transformer, counts: Sequence[int] | Tensor) -> None:
    generator = greedy(model)
    rows = [A + uncached(model, A), B + uncached(model, B)]
    generator.generate([A, B])
    generator.rollback(counts)
    rows[0] = rows[0][:-4]
    out = generator.generate([MORE, REST])
    assert new_tokens(out, 6) == [uncached(model, rows[0] + MORE), uncached(model, rows[1] + REST)]


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        (12, ValueError),
        (-1, ValueError),
        ([1], ValueError),
        ([0, 12], ValueError),
        ("12", TypeError),
        ([1.5, 0.0], TypeError),
        (torch.tensor([1.0, 0.0]), TypeError),
        (True, TypeError),
    ],
    ids=[
        "too many",
        "negative",
        "rows",
        "too many of a row",
        "text",
        "floats",
        "float tensor",
        "bool",
    ],
)
def test_a_rollback_that_cannot_be_changes_nothing(
    model: Transformer, counts: Any, error: type[Exception]
) -> None:
    generator = greedy(model)
    generator.generate([A, A])
    with pytest.raises(error):
        generator.rollback(counts)
    out = generator.generate([MORE, MORE])
    assert new_tokens(out, 6) == [uncached(model, A + uncached(model, A) + MORE)] * 2


def test_rollback_before_any_prompt_is_refused(model: Transformer) -> None:
    with pytest.raises(RuntimeError, match="rollback"):
        greedy(model).rollback(1)


def test_reset_forgets_the_conversation_and_the_batch_size(model: Transformer) -> None:
    generator = greedy(model)
    generator.generate([A, B])
    generator.reset()
    assert generator.generate([C]).tolist() == [C + uncached(model, C)]


def test_prefill_and_decode_step_give_the_logits_of_a_whole_forward(model: Transformer) -> None:
    generator = greedy(model)
    torch.testing.assert_close(generator.prefill([A])[0], next_logits(model, A), atol=1e-3, rtol=0)
    history = list(A)
    for token in (4, 51, 0):
        history.append(token)
        logits = generator.decode_step([token])
        assert logits.shape == (1, VOCABULARY)
        torch.testing.assert_close(logits[0], next_logits(model, history), atol=1e-3, rtol=0)
    logits = generator.prefill(torch.tensor([MORE]))
    torch.testing.assert_close(logits[0], next_logits(model, history + MORE), atol=1e-3, rtol=0)


def test_decode_step_feeds_the_pending_token_first(model: Transformer) -> None:
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    logits = generator.decode_step([8])
    torch.testing.assert_close(logits[0], next_logits(model, [*history, 8]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("how", ["break", "close", "keep"])
def test_a_consumer_that_stops_early_leaves_a_whole_conversation(
    model: Transformer, taken: int, how: str
) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    seen = [next(steps) for _ in range(taken)]
    if how == "close":
        steps.close()
    elif how == "break":
        del steps
    history = A + seen if taken else []
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


@pytest.mark.parametrize("how", ["break", "keep", "drop later"])
def test_stopping_after_one_row_ended_keeps_every_row_whole(model: Transformer, how: str) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    steps = generator.generate_iter([A, B])
    ended = uncached(model, A, 12).index(eos)
    for _ in range(ended + 4):
        next(steps)
    rows = [A + uncached(model, A, ended + 1), B + uncached(model, B, ended + 4)]
    if how == "break":
        del steps
    logits = generator.prefill([MORE, REST])
    if how == "drop later":
        del steps
    rows = [rows[0] + MORE, rows[1] + REST]
    for row, out in zip(rows, logits, strict=True):
        torch.testing.assert_close(out, next_logits(model, row), atol=1e-3, rtol=0)
    assert generator.cache is not None
    assert generator.cache.row_lengths == [len(row) for row in rows]


@pytest.mark.parametrize("starts", [[A], [A, B]], ids=["same rows", "other rows"])
def test_reset_ends_a_run_that_is_still_held(model: Transformer, starts: list[list[int]]) -> None:
    generator = greedy(model)
    steps = generator.generate_iter(starts)
    next(steps)
    generator.reset()
    history = generator.generate([C])[0].tolist()
    with pytest.raises((RuntimeError, StopIteration)):
        next(steps)
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_a_run_that_was_overtaken_does_not_touch_the_conversation(model: Transformer) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    history = [*A, next(steps)]
    history += generator.generate([MORE])[0].tolist()
    with pytest.raises((RuntimeError, StopIteration)):
        next(steps)
    assert generator.generate([REST]).tolist() == [REST + uncached(model, history + REST)]


def test_a_rollback_while_a_run_is_held_is_kept_or_refused(model: Transformer) -> None:
    generator = greedy(model)
    steps = generator.generate_iter([A])
    seen = [next(steps), next(steps), next(steps)]
    try:
        generator.rollback(2)
    except RuntimeError:
        return
    history = A + seen[:1]
    try:
        token = next(steps)
    except (RuntimeError, StopIteration):
        pass
    else:
        assert [token] == uncached(model, history, 1)
        history.append(token)
    del steps
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_calls_keeps_the_history(model: Transformer, seed: int) -> None:
    """Random turns of two rows, against lists of tokens and whole forward passes."""
    draw = random.Random(seed)
    generator = greedy(model, max_new_tokens=3, max_seq_len=512, eos_token_id=[1, 2, 3, 4, 5, 6])
    rows: list[list[int]] = [[], []]

    def words() -> list[list[int]]:
        return [[draw.randrange(7, 60) for _ in range(draw.randint(1, 9))] for _ in rows]

    def add(new: list[list[int]]) -> None:
        for row, tokens in zip(rows, new, strict=True):
            row.extend(tokens)

    for turn in range(14):
        action = draw.choice(["generate", "iterate", "prefill", "step", "rollback"])
        if not turn or action == "prefill":
            new = words()
            generator.prefill(new)
            add(new)
        elif action == "step":
            new = words()
            generator.decode_step([row[0] for row in new])
            add([row[:1] for row in new])
        elif action == "rollback":
            counts = [draw.randint(0, min(len(row), 7)) for row in rows]
            generator.rollback(counts)
            rows = [row[: len(row) - n] for row, n in zip(rows, counts, strict=True)]
        else:
            new = words()
            steps = generator.generate_iter(new)
            add(new)
            alive = [True, True]
            for _ in range(3 if action == "generate" else draw.randint(1, 2)):
                out = next(steps, None)
                if out is None:
                    break
                for b, token in enumerate(out.tolist()):
                    if alive[b]:
                        rows[b].append(token)
                        alive[b] = token not in generator.eos_ids
            del steps
        probe = words()
        logits = generator.prefill(probe)
        add(probe)
        for row, out in zip(rows, logits, strict=True):
            torch.testing.assert_close(out, next_logits(model, row), atol=2e-3, rtol=0)


# -- batches ---------------------------------------------------------------------------------


def front(rows: list[list[int]], fill: int = PAD) -> list[list[int]]:
    width = max(map(len, rows))
    return [[fill] * (width - len(row)) + row for row in rows]


def back(rows: list[list[int]], fill: int = PAD) -> list[list[int]]:
    width = max(map(len, rows))
    return [row + [fill] * (width - len(row)) for row in rows]


def flags(rows: list[list[int]], pad: Callable[..., list[list[int]]]) -> list[list[int]]:
    return pad([[1] * len(row) for row in rows], 0)


ROWS = [A, B, C]
BATCHES: dict[str, tuple[Any, Any]] = {
    "ragged lists": (ROWS, None),
    "ragged tensors": ([torch.tensor(row) for row in ROWS], None),
    "padded in front": (torch.tensor(front(ROWS)), None),
    "padded behind": (torch.tensor(back(ROWS)), None),
    "mask in front": (torch.tensor(front(ROWS, 33)), torch.tensor(flags(ROWS, front))),
    "mask behind": (torch.tensor(back(ROWS, 33)), flags(ROWS, back)),
    "boolean mask": (torch.tensor(front(ROWS, 33)), torch.tensor(flags(ROWS, front)) > 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_equals_each_row_alone(model: Transformer, name: str) -> None:
    ids, mask = BATCHES[name]
    out = greedy(model, pad_token_id=PAD).generate(ids, mask)
    expected = [row + uncached(model, row) for row in ROWS]
    assert out.tolist() == front(expected)


def test_padding_on_both_sides_moves_to_the_front(model: Transformer) -> None:
    ids = torch.tensor([[PAD, *B, PAD, PAD], [PAD, PAD, PAD, *REST, PAD]])
    out = greedy(model, pad_token_id=PAD).generate(ids)
    assert out[0].tolist() == [PAD] * 3 + B + uncached(model, B)
    assert out[1].tolist() == [PAD] * 4 + REST + uncached(model, REST)


def test_a_mask_makes_the_padding_id_a_token_like_others(model: Transformer) -> None:
    row = [PAD, 5, PAD]
    ids, mask = torch.tensor([[*row, 0, 0], A]), [[1, 1, 1, 0, 0], [1] * 5]
    out = greedy(model, pad_token_id=PAD).generate(ids, mask)
    assert new_tokens(out, 6) == [uncached(model, row), uncached(model, A)]


def test_a_single_row_keeps_its_padding_ids(model: Transformer) -> None:
    row = [PAD, 5, PAD]
    out = greedy(model, pad_token_id=PAD).generate([row])
    assert out.tolist() == [row + uncached(model, row)]


def test_a_batch_continues_with_rows_of_other_lengths(model: Transformer) -> None:
    generator = greedy(model, pad_token_id=PAD)
    generator.generate([A, B])
    rows = [A + uncached(model, A), B + uncached(model, B)]
    out = generator.generate([REST, C])
    expected = [uncached(model, rows[0] + REST), uncached(model, rows[1] + C)]
    assert out.tolist() == front([REST + expected[0], C + expected[1]])


@pytest.mark.parametrize("pad", [None, PAD])
def test_a_row_that_ends_early_is_filled_up_and_disturbs_no_other(
    model: Transformer, pad: int | None
) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos, pad_token_id=pad)
    out = generator.generate([A, B])
    path = uncached(model, A, 12)
    said = path[: path.index(eos) + 1]
    fill = eos if pad is None else pad
    assert new_tokens(out, 12) == [said + [fill] * (12 - len(said)), uncached(model, B, 12)]
    rows = [A + said, B + uncached(model, B, 12)]
    logits = generator.prefill([MORE, REST])
    for row, new, row_logits in zip(rows, (MORE, REST), logits, strict=True):
        torch.testing.assert_close(row_logits, next_logits(model, row + new), atol=1e-3, rtol=0)


def test_the_run_stops_when_every_row_ended(model: Transformer) -> None:
    path = uncached(model, A, 12)
    eos = path[4]
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    out = generator.generate([A, A])
    assert new_tokens(out, path.index(eos) + 1) == [path[: path.index(eos) + 1]] * 2
    assert out.shape[1] == len(A) + path.index(eos) + 1


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


def test_one_token_has_no_time_between_tokens(model: Transformer) -> None:
    generator = greedy(model, max_new_tokens=1)
    generator.generate([A])
    assert generator.metrics is not None
    assert generator.metrics.inter_token_p50_s != generator.metrics.inter_token_p50_s
    assert generator.metrics.ttft_s == generator.metrics.total_s


# -- running out of room ---------------------------------------------------------------------


def test_a_run_that_fits_exactly_works(model: Transformer) -> None:
    """The last token is never cached, so prompt + new tokens - 1 slots are enough."""
    generator = greedy(model, max_seq_len=len(A) + 5)
    assert generator.generate([A]).tolist() == [A + uncached(model, A)]
    assert generator.cache is not None
    assert generator.cache.row_lengths == [generator.config.max_seq_len]


@pytest.mark.parametrize("call", ["generate", "generate_iter", "prefill"])
def test_overflow_raises_before_anything_changed(model: Transformer, call: str) -> None:
    generator = greedy(model, max_seq_len=26)
    history = generator.generate([A])[0].tolist()
    assert generator.cache is not None
    lengths, metrics = generator.cache.row_lengths, generator.metrics
    with pytest.raises(ValueError, match="max_seq_len=26"):
        getattr(generator, call)([list(range(30))])
    assert generator.cache.row_lengths == lengths
    assert generator.metrics == metrics
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


def test_overflow_of_the_first_prompt_leaves_no_conversation(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=8)
    with pytest.raises(ValueError, match="max_seq_len=8"):
        generator.generate([A, A])
    assert generator.cache is None
    assert greedy(model, max_seq_len=8).generate([B]).tolist() == [B + uncached(model, B)]
    assert generator.generate([B]).tolist() == [B + uncached(model, B)]


def test_overflow_by_the_pending_token_alone(model: Transformer) -> None:
    generator = greedy(model, max_new_tokens=2, max_seq_len=10)
    history = generator.generate([A])[0].tolist()
    with pytest.raises(ValueError, match="max_seq_len"):
        generator.generate([[1, 2, 3]])
    out = generator.generate([[1, 2]])
    assert out.tolist() == [[1, 2, *uncached(model, [*history, 1, 2], 2)]]


def test_decode_step_on_a_full_cache_is_refused(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=5)
    generator.prefill([A])
    with pytest.raises(ValueError, match="max_seq_len"):
        generator.decode_step([1])
    generator.rollback(1)
    torch.testing.assert_close(
        generator.decode_step([1])[0], next_logits(model, [*A[:4], 1]), atol=1e-3, rtol=0
    )


def test_the_longest_row_decides_and_is_named(model: Transformer) -> None:
    generator = greedy(model, max_seq_len=12)
    with pytest.raises(ValueError, match="row 1"):
        generator.generate([A, C])


# -- failures in the middle --------------------------------------------------------------------


class BrokenLayerError(Exception):
    """What a failing layer raises."""


@pytest.fixture
def break_at(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], None]]:
    """Makes the second layer fail at its n-th call from now."""
    layer = model.model.layers[1]
    whole = layer.forward
    left = [-1]

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        left[0] -= 1
        if left[0] == -1:
            raise BrokenLayerError
        return whole(*args, **kwargs)

    def arm(call: int) -> None:
        left[0] = call

    monkeypatch.setattr(layer, "forward", forward)
    left[0] = -2
    yield arm


def lengths_of(generator: Generator) -> list[list[int]]:
    assert generator.cache is not None
    return [list(layer.lengths.host) for layer in generator.cache]


@pytest.mark.parametrize("rows", [[MORE], [MORE, REST]], ids=["alone", "ragged"])
def test_a_prompt_that_fails_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None], rows: list[list[int]]
) -> None:
    generator = greedy(model)
    starts = [A, B][: len(rows)]
    generator.generate(starts)
    before = lengths_of(generator)
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.generate(rows)
    assert lengths_of(generator) == before
    expected = [
        uncached(model, start + uncached(model, start) + row)
        for start, row in zip(starts, rows, strict=True)
    ]
    assert new_tokens(generator.generate(rows), 6) == expected


def test_a_first_prompt_that_fails_leaves_no_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    generator = greedy(model)
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.generate([A, B])
    assert generator.generate([C]).tolist() == [C + uncached(model, C)]


def test_decode_step_that_fails_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    break_at(0)
    with pytest.raises(BrokenLayerError):
        generator.decode_step([8])
    logits = generator.decode_step([8])
    torch.testing.assert_close(logits[0], next_logits(model, [*A, 8]), atol=1e-3, rtol=0)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_step_that_fails_keeps_what_was_yielded(
    model: Transformer, break_at: Callable[[int], None], step: int
) -> None:
    generator = greedy(model)
    break_at(step)
    seen: list[int] = []
    with pytest.raises(BrokenLayerError):
        seen.extend(generator.generate_iter([A]))
    seen = uncached(model, A, step)
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, A + seen + MORE)]


def test_a_step_that_fails_after_a_row_ended_keeps_both_rows(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    eos = an_eos_for(model, A, [B], 12)
    generator = greedy(model, max_new_tokens=12, eos_token_id=eos)
    ended = uncached(model, A, 12).index(eos)
    break_at(ended + 2)
    with pytest.raises(BrokenLayerError):
        list(generator.generate_iter([A, B]))
    rows = [A + uncached(model, A, ended + 1) + MORE, B + uncached(model, B, ended + 2) + REST]
    for row, out in zip(rows, generator.prefill([MORE, REST]), strict=True):
        torch.testing.assert_close(out, next_logits(model, row), atol=1e-3, rtol=0)


def test_generate_that_fails_after_some_steps_leaves_the_conversation(
    model: Transformer, break_at: Callable[[int], None]
) -> None:
    """Nothing was returned, so the same call can be made again."""
    generator = greedy(model)
    history = generator.generate([A])[0].tolist()
    before = lengths_of(generator)
    break_at(3)
    with pytest.raises(BrokenLayerError):
        generator.generate([MORE])
    assert lengths_of(generator) == before
    assert generator.generate([MORE]).tolist() == [MORE + uncached(model, history + MORE)]


@pytest.mark.parametrize("step", [1, 3])
def test_sampling_that_fails_does_not_feed_a_token_twice(
    model: Transformer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """NaN logits make torch.multinomial raise after the forward pass has grown the cache."""
    generator = Generator(model, cache_kind="fp32", max_new_tokens=8, top_k=1)
    whole, calls = model.lm_head.forward, [0]

    def damaged(x: Tensor) -> Tensor:
        calls[0] += 1
        return whole(x) * (torch.nan if calls[0] == step + 1 else 1.0)

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", damaged)
        steps = generator.generate_iter([A])
        seen = [next(steps) for _ in range(step)]
        with pytest.raises(ValueError):
            next(steps)
    logits = generator.prefill([MORE])
    torch.testing.assert_close(logits[0], next_logits(model, A + seen + MORE), atol=1e-3, rtol=0)


# -- settings and input that are wrong ---------------------------------------------------------

BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown kind": ({"cache_kind": "q3"}, "cache_kind.*q3.*fp32, fp16, bf16, q8_0, q4_0, nf4"),
    "kind of another type": ({"cache_kind": 4}, "cache_kind.*fp16"),
    "negative temperature": ({"temperature": -0.1}, "temperature.*greater than or equal to 0"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature.*finite"),
    "nan temperature": ({"temperature": float("nan")}, "temperature.*finite"),
    "top_p 0": ({"top_p": 0.0}, "top_p.*greater than 0"),
    "top_p 1.5": ({"top_p": 1.5}, "top_p.*less than or equal to 1"),
    "top_p nan": ({"top_p": float("nan")}, "top_p"),
    "top_k 0": ({"top_k": 0}, "top_k.*greater than or equal to 1"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens.*greater than or equal to 1"),
    "no room": ({"max_seq_len": 0}, "max_seq_len.*greater than or equal to 1"),
    "unknown field": ({"top_q": 1}, "top_q"),
    "block": ({"cache_qblock": 48}, "qblock.*48.*32, 64, 128"),
    "prefill": ({"prefill": "fast"}, "prefill.*'exact' or 'stored'"),
    "negative eos": ({"eos_token_id": -1}, "eos_token_id.*0 or more"),
    "negative eos in a list": ({"eos_token_id": [3, -1]}, "eos_token_id.*0 or more"),
    "negative pad": ({"pad_token_id": -1}, "pad_token_id.*greater than or equal to 0"),
    "negative seed": ({"seed": -1}, "seed.*greater than or equal to 0"),
    "a gate for a fixed kind": (
        {"cache_kind": "q4", "cache_quality_max_mean_kl": 0.1},
        "max_mean_kl.*cache_kind='auto'",
    ),
    "a window without a plan": (
        {"decode_local_window": 9},
        "decode_local_window=9 needs decode_plan",
    ),
    "eos both ways": ({"ignore_eos": True, "eos_token_id": 3}, "ignore_eos.*eos_token_id"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_name_the_field_and_what_is_allowed(model: Transformer, name: str) -> None:
    settings, message = BAD_SETTINGS[name]
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig(**settings)
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        Generator(model, **settings)
    with pytest.raises(ValidationError, match=f"(?s){message}"):
        GenerateConfig().updated(**settings)


def test_overrides_change_single_fields(model: Transformer) -> None:
    config = GenerateConfig(temperature=0.0, cache_kind="q4", top_k=3)
    generator = Generator(model, config, top_k=None, max_new_tokens=2)
    assert generator.config == GenerateConfig(temperature=0.0, cache_kind="q4", max_new_tokens=2)
    assert config.top_k == 3


def test_a_seed_torch_cannot_take_is_refused_by_name(model: Transformer) -> None:
    with pytest.raises(ValueError, match="seed"):
        Generator(model, seed=2**64)


@pytest.mark.parametrize("field", ["eos_token_id", "pad_token_id"])
def test_special_ids_outside_the_vocabulary_are_refused(model: Transformer, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 61.*0 to 60"):
        Generator(model, **{field: VOCABULARY})


def test_a_block_that_does_not_fit_the_heads_is_refused(model: Transformer) -> None:
    with pytest.raises(ValueError, match=r"qblock.*32"):
        greedy(model, cache_kind="q4", cache_qblock=64).generate([A])


BAD_INPUT: dict[str, tuple[Any, type[Exception], str]] = {
    "no rows": ([], ValueError, "no rows|empty"),
    "an empty prompt": ([[]], ValueError, "prompt 0 is empty"),
    "an empty prompt among others": ([A, []], ValueError, "prompt 1 is empty"),
    "an empty tensor": (torch.zeros(1, 0, dtype=torch.int64), ValueError, "empty"),
    "padding only": (torch.tensor([[4, 5], [PAD, PAD]]), ValueError, "prompt 1 is empty"),
    "an id too large": ([A, [5, VOCABULARY]], ValueError, "prompt 1.*61.*0 to 60"),
    "a negative id": ([[5, -1]], ValueError, "-1.*0 to 60"),
    "floats": ([[1.0, 2.0]], TypeError, "token ids"),
    "a float tensor": (torch.ones(1, 3), TypeError, "integer tensor"),
    "a boolean tensor": (torch.ones(1, 3, dtype=torch.bool), TypeError, "integer tensor"),
    "text": ("hello", TypeError, "tokenizer"),
    "texts": (["hello", "there"], TypeError, "token ids"),
    "bytes": (b"hello", TypeError, "tokenizer"),
    "none": (None, TypeError, "token ids"),
    "three dimensions": (torch.ones(1, 2, 3, dtype=torch.int64), TypeError, "integer tensor"),
    "an int": (5, TypeError, "token ids"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_and_changes_nothing(model: Transformer, name: str) -> None:
    ids, error, message = BAD_INPUT[name]
    generator = greedy(model, pad_token_id=PAD)
    for call in (generator.generate, generator.generate_iter, generator.prefill):
        with pytest.raises(error, match=message):
            call(ids)
    assert generator.cache is None
    assert generator.generate([A]).tolist() == [A + uncached(model, A)]


def test_another_batch_size_needs_a_reset(model: Transformer) -> None:
    generator = greedy(model)
    generator.generate([A, B])
    with pytest.raises(ValueError, match=r"2 rows.*1.*reset"):
        generator.generate([A])
    assert new_tokens(generator.generate([MORE, REST]), 6) == [
        uncached(model, A + uncached(model, A) + MORE),
        uncached(model, B + uncached(model, B) + REST),
    ]


def test_decode_step_before_prefill_is_refused(model: Transformer) -> None:
    with pytest.raises(RuntimeError, match="prefill"):
        greedy(model).decode_step([1])


@pytest.mark.parametrize(
    ("token", "error"),
    [([1, 2], ValueError), (1, ValueError), ([VOCABULARY], ValueError), ([1.0], TypeError)],
    ids=str,
)
def test_decode_step_takes_one_id_a_row(
    model: Transformer, token: Any, error: type[Exception]
) -> None:
    generator = greedy(model)
    generator.prefill([A])
    with pytest.raises(error):
        generator.decode_step(token)
    assert generator.cache is not None
    assert generator.cache.row_lengths == [len(A)]


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "a model", None], ids=["module", "str", "None"])
def test_what_is_no_language_model_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=r"no LanguageModel.*cache_layout"):
        Generator(thing)
