"""What docs/quality.md promises of the defaults, held on a small slice of the same text."""

import numpy as np
import pytest
import torch

from caramba_fast.models import demo_tokenizer, held_out_text, load_demo
from caramba_fast.quality import RecallFormat, cached_forward, compare, recall_rows
from caramba_fast.quality.hard import hard_variants

WINDOWS, CONTEXT = 3, 768
#: Perplexity ratio, top-1 agreement and acceptance; the slice is small, so the ratio has room for noise.
BOUNDS = {"q8": (1.001, 0.995, 0.99), "q4": (1.01, 0.97, 0.97), "nf4": (1.01, 0.97, 0.97)}
SUBJECTS = ["gqa", "dba", "gqa/outliers-64", "gqa/value-outliers", "gqa/bias", "dba/outliers-64"]


def subject(name):
    demo, _, variant = name.partition("/")
    return hard_variants(demo)[variant]() if variant else load_demo(demo)


@pytest.fixture(scope="module")
def text():
    ids = np.asarray(demo_tokenizer().encode(held_out_text()).ids)
    starts = np.linspace(0, len(ids) - CONTEXT, WINDOWS).astype(int)
    return ids, torch.from_numpy(np.stack([ids[s : s + CONTEXT] for s in starts]))


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_defaults_hold_their_bounds_where_plain_four_bits_break(name, text):
    hard = "/" in name
    kinds = ["q8", "q4", "nf4"] if not hard else ["q8", "q4"]
    scores = compare(cached_forward(subject(name)), text[1], [*kinds, "q4:plain"])
    base = scores["fp16"].nll

    def ratio(kind):
        return float(np.exp((scores[kind].nll - base).mean()))

    for kind in kinds:
        most, top1, accept = BOUNDS[kind]
        assert ratio(kind) <= (1.02 if hard and kind != "q8" else most), kind
        assert scores[kind].same.mean() >= (min(top1, 0.99) if hard else top1), kind
        assert scores[kind].accept.mean() >= accept, kind
    if hard:
        assert ratio("q4:plain") > 1.05
        assert scores["q4:plain"].kl.mean() > 20 * scores["q4"].kl.mean()


@pytest.mark.parametrize("name", ["gqa", "dba"])
def test_needles_are_found_as_in_fp16(name, text):
    form, rng = RecallFormat.of(demo_tokenizer(name)), np.random.default_rng(0)
    rows = [recall_rows(form, text[0][2000 * i :][:600], 640, 24, rng) for i in range(4)]
    ids = torch.from_numpy(np.stack([row.ids for row in rows]))
    positions = np.stack([row.positions for row in rows])
    scores = compare(cached_forward(load_demo(name)), ids, ["q8", "q4"], positions=positions)
    found = {kind: s.correct.mean() for kind, s in scores.items()}
    assert found["fp16"] > 0.9
    assert found["q8"] >= found["fp16"] - 0.01 and found["q4"] >= found["fp16"] - 0.03
