"""caramba_fast.calibrate and the file it is kept in."""

import json

import pytest
import torch
from safetensors.torch import save_file

import caramba_fast
from caramba_fast.cache import Calibration, CalibrationError, ModelKVCache
from caramba_fast.cache.statistics import StreamStatistics
from caramba_fast.config import cache_configs
from caramba_fast.infer import Generator
from caramba_fast.models import demo_tokenizer, held_out_text, load_demo


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(demo_tokenizer().encode(held_out_text()[:12000]).ids)[:2048]


@pytest.fixture(scope="module", params=["gqa", "dba"])
def model(request):
    return load_demo(request.param)


@pytest.fixture(scope="module")
def calibration(model, ids):
    return caramba_fast.calibrate(model, ids[:512], about={"text": "held-out"})


def test_every_stream_of_every_layer_is_measured(model, calibration):
    assert len(calibration.layers) == len(model.cache_layout)
    names = list(ModelKVCache(model.cache_layout, 1, 8)[0].streams)
    assert all(list(layer) == names for layer in calibration.layers)
    assert calibration.about == {"tokens": "512", "text": "held-out"}


def test_the_file_holds_all_of_it(calibration, tmp_path):
    calibration.save(tmp_path / "kept.safetensors")
    again = Calibration.load(tmp_path / "kept.safetensors")
    assert again.about == calibration.about
    for kept, given in zip(again.layers, calibration.layers, strict=True):
        for name, found in given.items():
            assert kept[name].tokens == found.tokens == 512
            for part in ("mean", "std", "diversity"):
                assert torch.equal(getattr(kept[name], part), getattr(found, part))
    assert [p.name for p in tmp_path.iterdir()] == ["kept.safetensors"]


def test_text_in_rows_and_in_one_piece_says_much_the_same(model, ids):
    one, rows = (caramba_fast.calibrate(model, x) for x in (ids[:1024], ids[:1024].view(4, 256)))
    for a, b in zip(one.layers, rows.layers, strict=True):
        for name in a:
            assert (a[name].mean - b[name].mean).norm() < 0.5 * a[name].std.norm()


def test_generation_takes_the_file_and_stores_short_prompts_by_it(model, calibration, tmp_path):
    path = tmp_path / "kept.safetensors"
    calibration.save(path)
    prompt = [demo_tokenizer().encode("import os\n").ids]
    settings = dict(cache_kind="q4:plain,center,scale", max_new_tokens=4, temperature=0.0)
    made = Generator(model, cache_calibration=path, **settings)
    made.generate(prompt)
    without = Generator(model, **settings)
    without.generate(prompt)
    key = next(name for name in made.cache[0].streams if name != "v")
    centered = [layer.streams[key].transform for layer in made.cache]
    assert any(t.bias is not None or t.mean is not None or t.scale.max() > 1 for t in centered)
    assert all(layer.streams[key].transform.is_identity for layer in without.cache)


def test_bad_ids_are_refused(model):
    for ids in (torch.zeros(63, dtype=torch.int64), torch.zeros(2, 2, 64, dtype=torch.int64)):
        with pytest.raises(ValueError, match="at least 64 tokens"):
            caramba_fast.calibrate(model, ids)


def statistics():
    return StreamStatistics.exact(torch.zeros(2, 4), torch.ones(2, 4))


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(
        CalibrationError, match=r"does not exist; caramba_fast\.calibrate makes one"
    ):
        Calibration.load(tmp_path / "none.safetensors")
    path = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(2)}, str(path))
    with pytest.raises(CalibrationError, match="no calibration"):
        Calibration.load(path)
    header = {"format": "caramba_fast.calibration", "version": "9", "tokens": "[]"}
    save_file({"x": torch.zeros(2)}, str(path), metadata=header)
    with pytest.raises(CalibrationError, match="version '9'; version 1 is read"):
        Calibration.load(path)
    header |= {"version": "1", "tokens": json.dumps([{"k": 5}])}
    save_file({"x": torch.zeros(2)}, str(path), metadata=header)
    with pytest.raises(CalibrationError, match="cannot be read as a calibration"):
        Calibration.load(path)
    Calibration([{"k": statistics()}]).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CalibrationError, match="cannot be read as a calibration"):
        Calibration.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "kept.safetensors"
    Calibration([{"k": statistics()}]).save(path)
    before = path.read_bytes()
    with pytest.raises((TypeError, AttributeError)):
        Calibration([{"k": statistics()}], {"text": object()}).save(path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_calibration_of_another_model_is_refused(calibration):
    layout = load_demo("gqa").cache_layout
    twice = Calibration([*calibration.layers, *calibration.layers])
    with pytest.raises(ValueError, match="calibration has 8 layers; the model has 4"):
        ModelKVCache(layout, 1, 64, calibration=twice, **cache_configs("q4"))


def test_generation_refuses_a_calibration_of_another_model_at_once(calibration, tmp_path):
    path = tmp_path / "kept.safetensors"
    Calibration([*calibration.layers, *calibration.layers]).save(path)
    with pytest.raises(ValueError, match="calibration has 8 layers; the model has 4"):
        Generator(load_demo("gqa"), cache_calibration=path)
