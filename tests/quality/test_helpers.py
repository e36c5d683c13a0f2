"""What quality and policy share: digests, the session that is measured, labels of pictures."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from caramba_fast import load_demo
from caramba_fast.cache import ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.models import Transformer
from caramba_fast.quality.compare import forced, new_session
from caramba_fast.quality.identity import add_tensor, digest_of, text_digest


@pytest.fixture(scope="module")
def gqa() -> Transformer:
    return load_demo("gqa")


def test_a_digest_is_that_of_its_parts_in_order() -> None:
    numbers = np.arange(6, dtype=np.int32)
    whole = hashlib.sha256(b"words" + numbers.astype(np.int64).tobytes()).hexdigest()
    assert digest_of(["words", numbers], 12) == whole[:12]
    assert digest_of([numbers[::2]]) == digest_of([numbers[::2].copy()])
    assert digest_of([numbers, "words"]) != whole[:16]


def test_a_text_is_told_from_others_by_tokens_shape_and_beginning() -> None:
    texts = ([1, 2, 3, 4], [[1, 2], [3, 4]], [1, 2, 3, 5])
    names = {text_digest(ids, bos) for ids in texts for bos in (None, 0)}
    assert len(names) == 6 and text_digest(None) == ""
    assert text_digest(torch.tensor([1, 2])) == text_digest([1, 2])


def test_a_tensor_is_told_from_others_by_name_shape_dtype_and_values() -> None:
    def named(name: str, value: torch.Tensor) -> str:
        digest = hashlib.sha256()
        add_tensor(digest, name, value, 8)
        return digest.hexdigest()

    x = torch.arange(64.0)
    others = [("y", x), ("x", x.reshape(8, 8)), ("x", x.half()), ("x", x + 1), ("x", x.to("meta"))]
    assert len({named(*other) for other in [("x", x), *others]}) == 6
    assert named("x", x.clone()) == named("x", x)


@pytest.mark.parametrize("spec", ["fp16", "q4"])
def test_what_is_measured_is_what_the_model_gives_on_the_same_cache(
    gqa: Transformer, spec: str
) -> None:
    ids = torch.randint(gqa.vocab_size, (3, 30))
    session = new_session(gqa, 3, 30, cache_configs(spec))
    cache = ModelKVCache(gqa.cache_layout, 3, 30, **cache_configs(spec))
    with torch.no_grad():
        first = session.feed(ids[:, :9].tolist())
        found = torch.cat([first[:, None], *forced(session, ids[:, 9:], 8)], dim=1)
        wanted = [gqa.forward(ids[:, :9], cache)[:, -1:]]
        wanted += [gqa.forward(part, cache) for part in ids[:, 9:].split(8, dim=1)]
    torch.testing.assert_close(found, torch.cat(wanted, dim=1), rtol=1e-4, atol=1e-4)
    assert session.cached == [30] * 3


def test_labels_meet_neither_points_nor_each_other() -> None:
    pytest.importorskip("matplotlib")
    from caramba_fast.quality.plot import new_figure, style_axes, write_labels

    figure = new_figure(6, 4)
    axis = figure.subplots()
    points = [(f"cache {i}", 1.0 + i % 2 / 50, 0.01 * (1 + i / 40)) for i in range(5)]
    axis.plot([x for _, x, _ in points], [y for *_, y in points], "o", markersize=5)
    style_axes(axis, "bytes", (0.2, 0.1))
    axis.set_xlim(0, 2)
    axis.set_ylim(0.001, 0.1)
    figure.draw_without_rendering()
    write_labels(axis, points)
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == 5
    for index, box in enumerate(boxes):
        assert not any(box.padded(-3).overlaps(other) for other in boxes[:index])
        for _, *point in points:
            assert not box.padded(-3).contains(*axis.transData.transform(point))
