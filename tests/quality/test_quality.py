"""The quality lab: scores against whole distributions, intervals by hand, and runs taken up again."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

from caramba_fast.cache import ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.models import (
    ModelConfig,
    Transformer,
    demo_path,
    demo_tokenizer,
    held_out_text,
    load_demo,
)
from caramba_fast.quality import (
    CacheQuality,
    CacheSize,
    NeedleQuality,
    QualityReport,
    RecallFormat,
    Scores,
    cache_quality,
    cache_size,
    cached_forward,
    compare,
    compare_caches,
    measure,
    needle_quality,
    read_csv,
    recall_rows,
)
from caramba_fast.quality.figures import (
    mean_interval,
    paired_interval,
    quantile_interval,
    share_interval,
    t_quantile,
)
from caramba_fast.quality.needles import token_ids
from caramba_fast.quality.plot import save_plot
from caramba_fast.quality.report import on_pareto_front

VOCAB = 211
Q8, Q4 = "q8:plain", "q4:plain"
TAIL = "q4:plain,residual_len=8,sink_len=2"
SPECS = [Q8, Q4, "q8:plain/nf4:plain", TAIL]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(2)
    config = ModelConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.15,
    )  # fmt: skip
    return Transformer(config).requires_grad_(False).eval()


def random_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


TEXT = random_ids(1, 1000, seed=4)[0].numpy()


def whole_log_probs(model: Transformer, ids: Tensor, spec: str, chunk: int = 16) -> Tensor:
    """(B, T - 1, V) float64, all positions at once."""
    parts = list(cached_forward(model, chunk)(ids[:, :-1], spec))
    return torch.cat(parts, 1).double().log_softmax(-1)


@torch.no_grad()
def decoded_log_probs(model: Transformer, ids: Tensor, spec: str) -> Tensor:
    """(B, T - 1, V) float64, token by token through a cache with the spec's own settings."""
    configs: dict[str, Any] = cache_configs(spec)
    cache = ModelKVCache(model.cache_layout, len(ids), ids.shape[1], prefill="stored", **configs)
    steps = [model.forward(ids[:, t : t + 1], cache) for t in range(ids.shape[1] - 1)]
    return torch.cat(steps, 1).double().log_softmax(-1)


def naive_scores(base: Tensor, found: Tensor, ids: Tensor) -> Scores:
    targets = ids[:, 1:]
    p, q = base.exp(), found.exp()
    return Scores(
        nll=-found.gather(-1, targets[..., None])[..., 0].numpy(),
        kl=(p * (base - found)).sum(-1).numpy(),
        accept=torch.minimum(p, q).sum(-1).numpy(),
        same=(p.argmax(-1) == q.argmax(-1)).numpy(),
        correct=(q.argmax(-1) == targets).numpy(),
    )


def assert_close(found: Scores, wanted: Scores) -> None:
    for name in ("nll", "kl", "accept"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=3e-5)
    for name in ("same", "correct"):  # but for near ties of the two first tokens
        assert np.mean(getattr(found, name) != getattr(wanted, name)) < 0.01


# -- scores ----------------------------------------------------------------------------------


@pytest.mark.parametrize("baseline", ["fp16", "fp32"])
def test_scores_are_those_of_whole_distributions(model: Transformer, baseline: str) -> None:
    ids = random_ids(3, 41)
    found = compare(cached_forward(model, 16), ids, SPECS, baseline)
    assert list(found) == [baseline, *SPECS]
    base = whole_log_probs(model, ids, baseline)
    for spec in found:
        wanted = naive_scores(base, whole_log_probs(model, ids, spec), ids)
        assert found[spec].shape == (3, 40)
        assert_close(found[spec], wanted)
    assert found[Q4].kl.mean() > 10 * found[Q8].kl.mean() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_of_two_bytes_are_scored_where_only_late_tokens_count(model, dtype) -> None:
    """Pieces in front of which no position is asked for have no scores, of no dtype."""
    ids, positions = random_ids(2, 41), torch.arange(20, 40).expand(2, -1)
    found = compare(
        cached_forward(copy.deepcopy(model).to(dtype), 8), ids, [Q8], positions=positions
    )
    assert found[Q8].shape == (2, 20) and found[Q8].nll.dtype == np.float32
    assert np.isfinite(found[Q8].kl).all()


@pytest.mark.usefixtures("on_reference")
@pytest.mark.parametrize("spec", SPECS)
def test_a_forward_gives_what_decoding_gives(model: Transformer, spec: str) -> None:
    """Up to codes that fall on the other side of a rounding, of which there are few."""
    ids = random_ids(2, 70)
    difference = whole_log_probs(model, ids, spec, 32) - decoded_log_probs(model, ids, spec)
    assert difference.abs().median() < 1e-5
    assert difference.abs().amax(-1).mean() < 1e-2


@pytest.mark.usefixtures("on_reference")
def test_scores_do_not_depend_on_chunks_or_pieces(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(2, 50)
    wanted = compare(cached_forward(model, 64), ids, SPECS)
    monkeypatch.setattr(sys.modules[compare.__module__], "_PIECE", 3 * VOCAB)
    monkeypatch.setattr(sys.modules[compare.__module__], "MOST_LOGITS", 2 * 7 * VOCAB)
    sizes = {logits.shape[1] for logits in cached_forward(model, 64)(ids, "q4")}
    assert max(sizes) == 7
    found = compare(cached_forward(model, 64), ids, SPECS)
    for spec, scores in wanted.items():
        assert_close(found[spec], scores)


def test_chosen_positions_are_taken_out_of_all(model: Transformer) -> None:
    ids = random_ids(3, 41)
    positions = np.stack([np.random.default_rng(row).permutation(40)[:5] for row in range(3)])
    some = compare(cached_forward(model, 16), ids, [Q4], positions=positions)
    every = compare(cached_forward(model, 16), ids, [Q4])
    for spec, scores in some.items():
        for name in Scores.names():
            wanted = np.take_along_axis(getattr(every[spec], name), positions, 1)
            np.testing.assert_allclose(getattr(scores, name), wanted, atol=1e-6)


class Given:
    """A forward that hands out logits made by hand, in chunks."""

    def __init__(self, chunk: int, **logits: Tensor) -> None:
        self.chunk, self.logits = chunk, logits

    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        yield from self.logits[spec].split(self.chunk, dim=1)


def test_tiny_and_huge_differences_are_scored_right() -> None:
    """Where p log(p/q) is lost to rounding, and where ratios of probabilities overflow."""
    base = torch.randn(1, 6, 50, generator=torch.Generator().manual_seed(1)) * 3
    near, far = base + 1e-4 * torch.randn_like(base), base.clone()
    far[..., 0] += 200.0  # all the probability on a token that had next to none
    base[..., -1] = near[..., -1] = far[
        ..., -1
    ] = -math.inf  # never sampled, as padded vocabularies are
    ids = torch.zeros(1, 7, dtype=torch.int64)
    found = compare(Given(4, base=base, near=near, far=far), ids, ["near", "far"], "base")
    p = base.double().log_softmax(-1)[..., :-1]
    for name, logits in (("near", near), ("far", far)):
        q = logits.double().log_softmax(-1)[..., :-1]
        kl = (p.exp() * (p - q)).sum(-1).numpy()
        np.testing.assert_allclose(found[name].kl, kl, rtol=2e-3)
        accept = torch.minimum(p.exp(), q.exp()).sum(-1).numpy()
        np.testing.assert_allclose(found[name].accept, accept, atol=1e-6)
    assert 0 < found["near"].kl.max() < 1e-7
    assert (found["base"].kl == 0).all() and (found["base"].accept == 1).all()


def test_a_cache_that_gives_nan_shows() -> None:
    base = torch.zeros(1, 3, 8)
    broken = torch.full_like(base, math.nan)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    found = compare(Given(2, base=base, broken=broken), ids, ["broken"], "base")["broken"]
    assert np.isnan(found.nll).all() and np.isnan(found.kl).all()


def test_what_cannot_be_compared_is_an_error(model: Transformer) -> None:
    run, ids = cached_forward(model), random_ids(2, 9)
    with pytest.raises(ValueError, match="T >= 2"):
        compare(run, ids[:, :1], ["q4"])
    with pytest.raises(ValueError, match=r"\(2, N\)"):
        compare(run, ids, ["q4"], positions=np.zeros((3, 1), int))
    with pytest.raises(ValueError, match="0 to 7 is allowed"):
        compare(run, ids, ["q4"], positions=np.full((2, 1), 8))
    with pytest.raises(ValueError, match="q3"):
        compare(run, ids, ["q3"])
    with pytest.raises(ValueError, match="chunk"):
        cached_forward(model, 0)
    uneven = {"a": torch.zeros(2, 8, VOCAB), "b": torch.zeros(2, 7, VOCAB)}
    with pytest.raises(ValueError, match="alike"):
        compare(Given(9, **uneven), ids, ["b"], "a")


def test_sizes_count_everything(model: Transformer) -> None:
    plain, tail = (cache_size(model.cache_layout, spec, 256) for spec in (Q4, TAIL))
    assert plain.bytes_per_token == tail.bytes_per_token == 2 * 2 * 18
    assert plain.bits_per_value == 4.5
    assert plain.cache_bytes_per_token == plain.bytes_per_token
    side = 2 * 2 * 32 * 2 * (8 + 32 + 2)  # layers, streams, dims, bytes, ring and sinks
    assert tail.cache_bytes_per_token == tail.bytes_per_token + side / 256
    with pytest.raises(ValueError, match="k_sem"):
        cache_size(model.cache_layout, "q4/q8/q4", 256)


def test_an_identity_tells_models_apart(model: Transformer) -> None:
    other = Transformer(model.config)
    assert cached_forward(model).identity == cached_forward(model).identity
    assert cached_forward(model).identity != cached_forward(other).identity


# -- intervals -------------------------------------------------------------------------------

T_TABLE = {
    1: 12.7062,
    2: 4.3027,
    3: 3.1824,
    4: 2.7764,
    7: 2.3646,
    15: 2.1314,
    30: 2.0423,
    500: 1.9647,
}


def test_students_t() -> None:
    for freedom, wanted in T_TABLE.items():
        assert t_quantile(freedom) == pytest.approx(wanted, rel=2e-3)


def test_the_interval_of_a_mean_is_that_of_the_means_of_windows() -> None:
    values = np.random.default_rng(0).normal(size=(8, 100)) + np.arange(8)[:, None]
    means = values.mean(1)
    half = t_quantile(7) * means.std(ddof=1) / math.sqrt(8)
    mean, interval = mean_interval(values)
    assert mean == pytest.approx(means.mean())
    assert interval == pytest.approx((mean - half, mean + half))
    chosen = np.zeros(values.shape, bool)
    chosen[:, :10] = True
    assert mean_interval(values, chosen)[1] == pytest.approx(mean_interval(values[:, :10])[1])


def test_no_interval_from_one_window_and_no_mean_from_none() -> None:
    mean, interval = mean_interval(np.ones((1, 5)))
    assert mean == 1 and all(map(math.isnan, interval))
    assert math.isnan(mean_interval(np.ones((3, 5)), np.zeros((3, 5), bool))[0])
    assert all(map(math.isnan, quantile_interval(np.ones((1, 5)), 0.99)[1]))


def test_a_share_of_all_keeps_an_interval() -> None:
    mean, (low, high) = share_interval(np.ones((10, 20), bool))
    assert (mean, high) == (1.0, 1.0)
    assert 0.97 < low < 0.99
    same = np.random.default_rng(0).random((10, 20)) < 0.5
    difference, (low, high) = paired_interval(same, same)
    assert difference == 0 and -0.02 < low < 0 < high < 0.02


@pytest.mark.parametrize("figure", ["mean", "p90", "paired"])
def test_intervals_hold_the_truth_as_often_as_they_say(figure: str) -> None:
    """Windows with a level of their own: intervals over tokens would hold it far less often."""
    rng, trials, held = np.random.default_rng(3), 300, 0
    for _ in range(trials):
        level = rng.normal(size=(16, 1))
        if figure == "mean":
            _, (low, high) = mean_interval(rng.normal(size=(16, 64)) + level)
            truth = 0.0
        elif figure == "p90":
            _, (low, high) = quantile_interval(rng.normal(size=(16, 64)) + level, 0.9)
            truth = 1.2816 * math.sqrt(2)
        else:
            hard = rng.random((16, 64)) < np.clip(0.1 + 0.08 * level, 0, 1)
            _, (low, high) = paired_interval(~hard, np.ones_like(hard))
            truth = -0.1045
        held += low <= truth <= high
    assert 0.86 <= held / trials <= 1.0


# -- figures ---------------------------------------------------------------------------------


def scores_of(nll: Any, kl: Any, correct: Any) -> Scores:
    nll, kl = np.asarray(nll, np.float32), np.asarray(kl, np.float32)
    return Scores(nll, kl, 1 - kl / 10, kl < 0.5, np.asarray(correct, bool))


def test_figures_from_scores_made_by_hand() -> None:
    base = scores_of([[1, 2], [3, 2]], [[0, 0], [0, 0]], [[1, 1], [1, 0]])
    found = scores_of([[1.5, 2], [3, 3]], [[0.1, 0.2], [0.3, 0.8]], [[1, 0], [1, 0]])
    size = CacheSize(10, 4.5, 12)
    row = cache_quality("q4", found, base, size)
    assert (row.kind, row.tokens, row.windows, row.context) == ("q4", 4, 2, 3)
    assert row.nll == 2.375
    assert row.delta_nll == 0.375 and row.ppl_ratio == pytest.approx(math.exp(0.375))
    half = t_quantile(1) * 0.125  # of window means 0.25 and 0.5
    assert row.ci["delta_nll"] == pytest.approx((0.375 - half, 0.375 + half), rel=1e-6)
    assert row.ci["ppl_ratio"] == pytest.approx((math.exp(0.375 - half), math.exp(0.375 + half)))
    assert row.mean_kl == pytest.approx(0.35) and row.ci["mean_kl"][0] == 0
    assert row.p99_kl == pytest.approx(0.8) and row.acceptance == pytest.approx(0.965)
    assert row.top1_agreement == 0.75
    assert (row.bytes_per_token, row.bits_per_value, row.cache_bytes_per_token) == (10, 4.5, 12)
    assert row.needles == 0 and math.isnan(row.recall)


def test_needles_are_counted_by_depth_and_paired() -> None:
    base = scores_of(np.zeros((2, 4)), np.zeros((2, 4)), [[1, 1, 1, 0], [1, 1, 1, 1]])
    found = scores_of(np.ones((2, 4)), np.zeros((2, 4)), [[1, 0, 1, 0], [1, 0, 1, 1]])
    depths = np.asarray([[0.1, 0.3, 0.6, 0.99], [0.2, 0.45, 0.7, 1.0]])
    whole = needle_quality("q4", 64, found, base, depths)
    assert (whole.needles, whole.recall, whole.delta_recall) == (8, 5 / 8, -2 / 8)
    assert whole.delta_needle_nll == 1
    parts = [
        needle_quality("q4", 64, found, base, depths, part)
        for part in ((0, 0.25), (0.25, 0.5), (0.75, 1))
    ]
    assert [part.needles for part in parts] == [2, 2, 2]
    assert [part.delta_recall for part in parts] == [0, -1, 0]
    own = needle_quality("fp16", 64, base, base, depths)
    assert own.delta_recall == 0 and own.ci["delta_recall"] == (0, 0)
    row = cache_quality("q4", found, base, CacheSize(1, 1, 1), whole)
    assert (row.needles, row.recall) == (8, 5 / 8) and row.ci["recall"] == whole.ci["recall"]


def test_the_pareto_front() -> None:
    points = [(16, 0.0), (8, 0.1), (4, 0.5), (4, 0.6), (9, 0.1), (3, 2.0), (8, 0.1)]
    assert on_pareto_front(points) == [True, True, True, False, False, True, True]


def test_compare_caches_gives_the_figures_of_compare(model: Transformer) -> None:
    ids = random_ids(4, 33)
    rows = compare_caches(model, ids, ["fp16", "q4"])
    assert [row.kind for row in rows] == ["fp16", "q4"]
    assert rows[0].delta_nll == rows[0].mean_kl == 0 and rows[0].top1_agreement == 1
    scores = compare(cached_forward(model), ids, ["q4"])
    assert rows[1].mean_kl == pytest.approx(float(scores["q4"].kl.mean()))
    assert rows[1].tokens == 4 * 32


# -- recall ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def form() -> RecallFormat:
    return RecallFormat.of(demo_tokenizer())


@pytest.mark.parametrize(("length", "pairs"), [(128, 1), (512, 20), (1024, 42)])
def test_every_answer_is_in_the_text(form: RecallFormat, length: int, pairs: int) -> None:
    tokenizer = demo_tokenizer()
    text = token_ids(tokenizer, held_out_text())
    row = recall_rows(form, text, length, pairs, np.random.default_rng(pairs))
    assert row.ids.shape == (length,) and row.positions.shape == row.answers.shape == (pairs,)
    assert (row.ids[row.positions + 1] == row.answers).all()
    lines = re.findall(r"#: (\w+) = (\w+)\n", tokenizer.decode(row.ids.tolist()))
    given, asked = dict(lines[:pairs]), lines[pairs:]
    assert len(given) == len(set(given.values())) == pairs
    assert sorted(asked) == sorted(given.items())
    assert pairs < 3 or asked != lines[:pairs]
    words = [tokenizer.decode([int(answer)]).strip() for answer in row.answers]
    assert [value for _, value in asked] == words
    end = length - pairs * form.line_length
    for position, answer, depth, distance in zip(
        row.positions, row.answers, row.depths, row.distances, strict=True
    ):
        place = position + 1 - distance
        assert row.ids[place] == answer and depth == place / end < 1
        assert place < end <= position
    assert pairs < 20 or np.histogram(row.depths, 4, (0, 1))[0].min() >= pairs // 8


def test_rows_differ_and_repeat_with_their_seed(form: RecallFormat) -> None:
    text = token_ids(demo_tokenizer(), held_out_text())
    first, again, other = (
        recall_rows(form, text, 256, 8, np.random.default_rng(seed)).ids for seed in (1, 1, 2)
    )
    assert (first == again).all() and (first != other).any()


def test_rows_that_cannot_be_made_are_errors(form: RecallFormat) -> None:
    rng, text = np.random.default_rng(0), np.zeros(64, int)
    with pytest.raises(ValueError, match=f"1 to {len(form.words) // 2} is allowed"):
        recall_rows(form, text, 10**6, len(form.words), rng)
    with pytest.raises(ValueError, match="needles take 240 tokens"):
        recall_rows(form, text, 240, 20, rng)
    with pytest.raises(ValueError, match="text has 64 tokens; 88 are needed"):
        recall_rows(form, text, 100, 1, rng)


def test_text_without_line_ends_takes_needles_anywhere(form: RecallFormat) -> None:
    row = recall_rows(form, np.full(500, form.words[0]), 300, 10, np.random.default_rng(0))
    assert len(np.unique(np.diff(np.sort(row.depths)))) > 1


def test_a_tokenizer_of_transformers_gives_the_same_format(form: RecallFormat) -> None:
    from transformers import AutoTokenizer

    theirs = RecallFormat.of(AutoTokenizer.from_pretrained(demo_path()))
    for name, value in vars(form).items():
        np.testing.assert_array_equal(getattr(theirs, name), value)


def sentencepiece(words: int, line_end: str = "\n") -> Tokenizer:
    """A unigram tokenizer that writes spaces as ▁, one in front of the text too."""
    letters = "abcdefghij"
    names = [f"{a}{b}{c}" for a in letters for b in letters for c in letters][:words]
    pieces = ["<unk>", line_end, "▁", "#:", "▁=", "▁#:", *(f"▁{name}" for name in names)]
    model = models.Unigram([(piece, -1.0 - (piece == "▁")) for piece in pieces], 0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def test_a_sentencepiece_tokenizer_has_a_format() -> None:
    tokenizer = sentencepiece(80)
    form = RecallFormat.of(tokenizer)
    assert len(form.words) == 80
    written = "".join(
        tokenizer.id_to_token(int(i)) for i in form.line(form.words[0], form.words[1])
    )
    assert written == "#:▁aaa▁=▁aab\n"


def test_tokenizers_without_words_or_lines_say_so() -> None:
    with pytest.raises(ValueError, match=r"63 one-token words.*switch them off"):
        RecallFormat.of(sentencepiece(63))
    with pytest.raises(ValueError, match="line end of its own"):
        RecallFormat.of(sentencepiece(80, line_end="\n#:"))


def test_the_demo_model_answers_the_rows(form: RecallFormat) -> None:
    text = token_ids(demo_tokenizer(), held_out_text())
    row = recall_rows(form, text, 512, 20, np.random.default_rng(0))
    found = compare(
        cached_forward(load_demo()),
        torch.from_numpy(row.ids[None]),
        ["q8"],
        positions=row.positions[None],
    )
    assert all(scores.correct.mean() > 0.9 for scores in found.values())


# -- the lab ---------------------------------------------------------------------------------


class Counting:
    """A forward that notes what it runs, and stops after some runs."""

    def __init__(self, model: Transformer, most: int = 10**9) -> None:
        self.run, self.most = cached_forward(model, 32), most
        self.layout, self.identity = self.run.layout, self.run.identity
        self.calls: list[str] = []

    def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
        self.calls.append(spec)
        if len(self.calls) > self.most:
            raise KeyboardInterrupt
        yield from self.run(ids, spec)


FORM = RecallFormat(*(np.arange(a, b) for a, b in ((20, 120), (1, 3), (3, 4), (4, 5))))
LAB: dict[str, Any] = dict(
    specs=["q8", "q4"],
    text_ids=TEXT,
    recall=FORM,
    contexts=[64, 96],
    tokens=300,
    needles=16,
    batch=3,
)


@pytest.fixture(scope="module")
def report(model: Transformer) -> QualityReport:
    return measure(Counting(model), **LAB)


def test_the_report_has_every_cache_at_every_context(report: QualityReport) -> None:
    assert [(row.context, row.kind) for row in report.rows] == [
        (context, kind) for context in (64, 96) for kind in ("fp16", "q8", "q4")
    ]
    assert report.contexts == [64, 96] and report.baseline == "fp16"
    assert [row.windows for row in report.rows] == [4] * 3 + [3] * 3
    assert [row.tokens for row in report.rows] == [4 * 63] * 3 + [3 * 95] * 3
    assert all(row.needles == 16 and 0 <= row.recall <= 1 for row in report.rows)
    assert report.rows[0].pareto and report.row("q8", 96) is report.rows[4]
    assert report.row("q8").context == 64
    with pytest.raises(KeyError, match="q8 at 64"):
        report.row("nf4")
    for row in report.rows:
        parts = [n for n in report.needles if (n.kind, n.context) == (row.kind, row.context)]
        assert sum(part.needles for part in parts) == row.needles and len(parts) == 4
        low, high = row.ci["delta_nll"]
        assert low <= row.delta_nll <= high


def test_windows_are_of_the_text_and_do_not_overlap(model: Transformer) -> None:
    seen: list[Tensor] = []

    class Watching(Counting):
        def __call__(self, ids: Tensor, spec: str) -> Iterator[Tensor]:
            seen.append(ids)
            yield from self.run(ids, spec)

    settings = {**LAB, "recall": None, "contexts": [50], "tokens": 1000, "specs": []}
    measure(Watching(model), **settings, bos_token_id=7)
    rows = torch.cat(seen).numpy()
    assert len(rows) == 20 and (rows[:, 0] == 7).all()
    text = TEXT[: 20 * 49].reshape(20, 49)[:, :-1]
    assert sorted(map(tuple, rows[:, 1:])) == sorted(map(tuple, text))


def interrupted(model: Transformer, folder: Path, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        measure(Counting(model, after), **LAB, folder=folder)


@pytest.mark.parametrize("after", [1, 8])
def test_an_interrupted_run_goes_on(
    model: Transformer, report: QualityReport, tmp_path: Path, after: int
) -> None:
    interrupted(model, tmp_path, after)
    written = len(list(tmp_path.glob("*.npz")))
    assert written == after // 3 * 3 and not list(tmp_path.glob(".*.part"))
    second, steps = Counting(model), list[tuple[int, int]]()
    found = measure(second, **LAB, folder=tmp_path, progress=lambda *step: steps.append(step))
    assert found == report
    third = Counting(model)
    assert measure(third, **LAB, folder=tmp_path) == report
    assert third.calls == []
    files = len(list(tmp_path.glob("*.npz")))
    assert len(second.calls) == files - written
    assert steps[-1][0] == steps[-1][1] and steps == sorted(steps)


def test_more_is_measured_without_measuring_again(model: Transformer, tmp_path: Path) -> None:
    measure(Counting(model), **LAB, folder=tmp_path)
    more = Counting(model)
    settings = {**LAB, "specs": ["q8", "nf4", "q4"]}
    found = measure(more, **settings, folder=tmp_path)
    assert set(more.calls) == {"fp16", "nf4"}
    assert found == measure(Counting(model), **settings)


def test_a_spec_that_means_something_else_by_now_is_measured_again(
    model: Transformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(Counting(model), **LAB, folder=tmp_path)
    monkeypatch.setattr(
        "caramba_fast.quality.store.cache_configs",
        lambda spec: cache_configs("q4:rotate" if spec == "q4" else spec),
    )
    again = Counting(model)
    measure(again, **LAB, folder=tmp_path)
    assert set(again.calls) == {"fp16", "q4"}


@pytest.mark.parametrize("damage", ["cut", "text", "other shape"])
def test_a_damaged_part_is_reported_and_measured_again(
    model: Transformer, report: QualityReport, tmp_path: Path, damage: str
) -> None:
    measure(Counting(model), **LAB, folder=tmp_path)
    file = sorted(tmp_path.glob("text64-q4-*.npz"))[0]
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "text":
        file.write_text("nothing")
    else:
        np.savez(file, **{name: np.zeros((1, 2)) for name in Scores.names()})
    again = Counting(model)
    with pytest.warns(UserWarning, match=f"{file.name} is damaged"):
        assert measure(again, **LAB, folder=tmp_path) == report
    assert again.calls == ["fp16", "q4"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_ids": TEXT[::-1]}, "whose text is"),
        ({"baseline": "fp32"}, "whose baseline is 'fp16', not 'fp32'"),
    ],
)
def test_a_folder_of_another_measurement_is_refused(
    model: Transformer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    interrupted(model, tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        measure(Counting(model), **{**LAB, **change}, folder=tmp_path)
    other = Counting(Transformer(model.config))
    with pytest.raises(ValueError, match="whose model is"):
        measure(other, **LAB, folder=tmp_path)
    assert other.calls == []
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        measure(other, **LAB, folder=tmp_path)


def test_finished_parts_are_those_of_one_configuration(model: Transformer, tmp_path: Path) -> None:
    lab = {**LAB, "specs": ["q8"], "contexts": [64], "needles": 0}
    measure(cached_forward(model), **lab, folder=tmp_path)
    other = Transformer(model.config.model_copy(update={"rms_norm_eps": 1e-3}))
    other.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="whose config_digest is"):
        measure(cached_forward(other), **lab, folder=tmp_path)


def test_weights_behind_an_adapter_tell_forwards_apart(model: Transformer) -> None:
    class Adapter:
        def __init__(self, inner: Transformer) -> None:
            self.inner, self.vocab_size = inner, inner.vocab_size
            self.cache_layout = inner.cache_layout

    found = {cached_forward(Adapter(x)).identity for x in (model, Transformer(model.config))}  # type: ignore[arg-type]
    assert len(found) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"specs": ["q3"]}, "q3"),
        ({"specs": ["q4/q8/q4"]}, "k_sem"),
        (
            {"contexts": [600], "tokens": 1200},
            "the text has 1000 tokens; 2 windows of context 600 need 1200",
        ),
        ({"tokens": 64}, "tokens is 64; 2 windows of context 64 need 128"),
        ({"contexts": []}, "contexts"),
        ({"contexts": [64, 64]}, "contexts"),
        ({"contexts": [16], "needles": 4}, "context is 16; a needle needs 24"),
        ({"batch": 0}, "batch is 0"),
        ({"needles": -1}, "needles is -1"),
        ({"text_ids": TEXT[None]}, r"text_ids has shape \(1, 1000\)"),
    ],
)
def test_wrong_settings_are_named_before_anything_runs(
    model: Transformer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = Counting(model)
    with pytest.raises(ValueError, match=message):
        measure(run, **{**LAB, **change}, folder=tmp_path)
    assert run.calls == [] and not list(tmp_path.iterdir())


# -- files -----------------------------------------------------------------------------------


def test_json_and_csv_come_back_as_they_were(report: QualityReport, tmp_path: Path) -> None:
    report.to_json(tmp_path / "a.json")
    assert QualityReport.from_json(tmp_path / "a.json") == report
    report.to_csv(tmp_path / "a.csv")
    assert read_csv(tmp_path / "a.csv") == report.rows


def test_nan_and_infinity_survive_files(tmp_path: Path) -> None:
    rows = [
        CacheQuality(
            "q4", 1, 800.0, 800.0, math.inf, 3.0, 0.5, 10.0, ci={"nll": (math.nan, math.inf)}
        ),
        CacheQuality("q8", 1, 1.0, 1.0, 1.0, 3.0, 0.5, 10.0, needles=2, ci={"recall": (0.5, 1.0)}),
    ]
    needles = [NeedleQuality("q4", 8, 0.0, 0.25, 0, math.nan, math.nan, math.nan)]
    report = QualityReport(rows, needles, {"baseline": "fp16"})
    report.to_json(tmp_path / "a.json")
    report.to_csv(tmp_path / "a.csv")
    found = QualityReport.from_json(tmp_path / "a.json")
    assert repr(found) == repr(report)
    assert repr(read_csv(tmp_path / "a.csv")) == repr(rows)


def test_files_that_are_something_else_are_errors(tmp_path: Path) -> None:
    for content in ("", "[]", '{"rows": [{}], "needles": [], "about": {}}'):
        (tmp_path / "a").write_text(content)
        with pytest.raises(ValueError, match="is not a quality report"):
            QualityReport.from_json(tmp_path / "a")
    (tmp_path / "a").write_text("kind,tokens\nq4,3\n")
    with pytest.raises(ValueError, match="is not a table"):
        read_csv(tmp_path / "a")


@pytest.mark.parametrize("ending", [".png", ".svg"])
@pytest.mark.parametrize("long", [False, True])
def test_a_picture_of_every_context(
    report: QualityReport, tmp_path: Path, ending: str, long: bool
) -> None:
    from dataclasses import replace

    if long:
        rows = [replace(r, kind=f"{r.kind}:residual_len=64,sink_len=4") for r in report.rows[1:]]
        report = QualityReport([report.rows[0], *rows], [], report.about)
    file = tmp_path / f"picture{ending}"
    save_plot(report, file, "a title")
    content = file.read_bytes()
    assert len(content) > 5000
    if ending == ".svg":
        assert content.count(b"context 64") == content.count(b"context 96") == 1


def test_pictures_say_what_they_need(
    report: QualityReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"ends in '\.jpg'; \.png and \.svg"):
        save_plot(report, tmp_path / "a.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        save_plot(report, tmp_path / "a.png")
