"""What users of an earlier version had still holds: names, calls, commands, texts, and files it wrote.

`before.py` says where ``data/before`` comes from, and how to renew it when a change is meant.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import before, described
from support.before import HERE
from typer.testing import CliRunner

import caramba_fast
from caramba_fast import (
    CarambaCache,
    accelerate,
    choose_cache,
    load_demo,
    load_model,
)
from caramba_fast.cache.state import without_constants
from caramba_fast.cli.app import app
from caramba_fast.infer import GenerateConfig
from caramba_fast.manifest import prepare, read_manifest, run_manifest
from caramba_fast.policy import CachePlan, CachePolicyFields, PlanFile, PlanKey
from caramba_fast.quality import QualityReport, read_csv

CALIBRATED = before.MANIFEST.replace("temperature: 0.0", "cache_calibration: demo.calibration")
#: What attention adds in another order where other kernels serve it.
CLOSE = dict(rtol=1e-3, atol=1e-3)


def recorded(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


NAMES, COMMANDS, TEXTS = (recorded(f"{name}.json") for name in ("names", "commands", "texts"))
#: States of caches, by their storage; one had defaults that took constants, of which so few tokens gave none.
LAYERS = before.saved(HERE / "layers.pt.gz")
LAYERS[before.STORED[3]] = LAYERS.pop(f"q4:{before.SIDES}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(HERE, tmp_path / "before"))


# -- names ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return described.names(NAMES["documented"])


@pytest.mark.parametrize("path", NAMES["documented"])
def test_every_path_that_was_documented_resolves(path: str) -> None:
    assert described.resolve(path) is not None


@pytest.mark.parametrize("package", NAMES["packages"])
def test_the_packages_export_what_they_did(package: str, names: dict[str, Any]) -> None:
    assert names["packages"].get(package) == NAMES["packages"][package]


@pytest.mark.parametrize("path", NAMES["described"])
def test_every_name_is_what_it_was_and_called_as_it_was(path: str, names: dict[str, Any]) -> None:
    assert names["described"].get(path) == NAMES["described"][path]


def test_there_is_no_other_public_name(names: dict[str, Any]) -> None:
    assert names["described"].keys() == NAMES["described"].keys()


# -- commands -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    return described.commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_what_it_did(name: str, commands: dict[str, Any]) -> None:
    assert commands.get(name) == COMMANDS[name]


def test_there_is_no_other_command(commands: dict[str, Any]) -> None:
    assert commands.keys() == COMMANDS.keys()


# -- texts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> dict[str, Any]:
    return before.texts()


@pytest.mark.parametrize("name", TEXTS)
def test_every_way_to_generate_writes_what_it_did(name: str, texts: dict[str, Any]) -> None:
    assert texts[name] == TEXTS[name]


# -- caches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", before.STORED)
def test_the_state_of_a_cache_gives_what_it_gave(spec: str) -> None:
    then = LAYERS[spec]
    cache = before.layer_cache(spec)
    cache.load_state_dict(then["state"])
    assert cache.seq_lens.tolist() == list(before.LENGTHS)
    for found, wanted in zip(cache.get(), then["values"], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    attended = cache.attend(*before.queries(spec))
    torch.testing.assert_close(attended, then["attended"], **CLOSE)
    assert_same(cache.state_dict(), without_constants(then["state"]))


@pytest.mark.parametrize("spec", before.STORED)
def test_the_same_tokens_are_stored_as_they_were(spec: str) -> None:
    assert_same(before.filled(spec)["state"], without_constants(LAYERS[spec]["state"]))


def assert_same(found: Any, wanted: Any) -> None:
    """Two states, to the last bit."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(found[key], value)
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_same(*pair)
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    else:
        assert found == wanted


@torch.no_grad()
def test_a_model_goes_on_from_the_states_of_its_caches() -> None:
    then, model = before.saved(HERE / "model.pt.gz"), load_model(HERE / "model")
    cache = before.model_cache(model)
    for layer, state, values in zip(cache, then["layers"], then["values"], strict=True):
        layer.load_state_dict(state)
        for found, wanted in zip(layer.get(), values, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert cache.row_lengths == [20]
    torch.testing.assert_close(model(before.asked(3), cache), then["logits"], **CLOSE)


@torch.no_grad()
def test_a_model_of_transformers_goes_on_from_a_state() -> None:
    then = before.saved(HERE / "transformers.pt.gz")
    model = accelerate(before.loaded(HERE / "model"), before.MODEL_CACHE)
    cache = CarambaCache(model, before.MODEL_CACHE).load_state_dict(then["state"])
    assert cache.length == int(cache.get_seq_length()) == 20
    for layer, state in zip(cache.state_dict()["layers"], then["state"]["layers"], strict=True):
        assert_same(layer, {**state, "store": without_constants(state["store"])})
    torch.testing.assert_close(before.next_logits(model, cache), then["logits"], **CLOSE)
    assert cache.dequantizations == 0


def test_a_state_of_other_storage_is_refused_with_the_reason() -> None:
    cache = before.layer_cache("fp32")
    with pytest.raises(ValueError, match=r"the state does not fit: .*q8_0"):
        cache.load_state_dict(LAYERS["q8:plain/q4:plain"]["state"])
    model = accelerate(before.loaded(HERE / "model"), "q8")
    with pytest.raises(ValueError, match=r"the state does not fit: .*q4_0"):
        CarambaCache(model, "q8").load_state_dict(
            before.saved(HERE / "transformers.pt.gz")["state"]
        )


def test_a_state_with_constants_is_refused_by_name() -> None:
    state = copy.deepcopy(LAYERS["q8:plain/q4:plain"]["state"])
    state["streams"]["k"]["transform"]["mean"] = torch.zeros(1, 32)
    with pytest.raises(ValueError, match="'k' was stored with 'mean' of an earlier version"):
        before.layer_cache("q8:plain/q4:plain").load_state_dict(state)


# -- what is gone ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Calibration", "Rotary", "Transform", "calibrate"])
def test_a_name_that_is_gone_says_why(name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} was removed: 'q8', 'q4'"):
        getattr(caramba_fast, name)
    assert name not in dir(caramba_fast)


@pytest.mark.parametrize(
    "call",
    [
        lambda: GenerateConfig(cache_calibration="demo.calibration"),
        lambda: GenerateConfig().updated(cache_calibration=None),
        lambda: CarambaCache(before.loaded(HERE / "model"), "q4", calibration="demo.calibration"),
        lambda: CarambaCache(before.loaded(HERE / "model"), "q4", center=False),
        lambda: prepare(read_manifest(CALIBRATED), HERE),
    ],
    ids=["config", "change of a config", "transformers", "field under transformers", "manifest"],
)
def test_a_setting_that_is_gone_says_why(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is no setting any more: keys by channel"):
        call()


@pytest.mark.parametrize("words", [(), ("model.calibration", "--model", "demo:gqa")])
def test_the_command_that_is_gone_says_why(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert result.exit_code == 2 and "'calibrate' was removed" in result.output


# -- plans ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    """The device and versions of plans that are made now."""
    settings = CachePolicyFields(cache_auto_benchmark=False)
    plan = choose_cache(load_demo(), settings, **before.PLANNED)
    return {"device": plan.key.device, "versions": plan.key.versions}


def kept_plans() -> dict[str, Any]:
    return recorded("plans.json")["plans"]


def test_plans_say_what_their_file_holds(folder: Path) -> None:
    """Read, and written again in place of themselves."""
    file = PlanFile(folder / "plans.json")
    for plan in plans(file):
        file.put(plan)
    again = json.loads((folder / "plans.json").read_text(encoding="utf-8"))
    assert again == recorded("plans.json")


def plans(file: PlanFile) -> list[CachePlan]:
    """Every plan of the file, by its own key."""
    found = [file.get(PlanKey(**plan["key"])) for plan in kept_plans().values()]
    there = [plan for plan in found if plan is not None]
    assert len(there) == len(found) == len(before.PLANS)
    return there


@pytest.mark.parametrize("name", before.PLANS)
def test_a_plan_made_on_this_device_is_found_again(
    name: str, folder: Path, here: dict[str, Any]
) -> None:
    path = folder / "plans.json"
    file = PlanFile(path)
    for plan in plans(file):
        file.put(before.moved(plan, **here))
    found = before.planned(name, path)
    assert found.reused
    rows = [row.model_dump(mode="json") for row in found.rows]
    assert rows in [plan["rows"] for plan in kept_plans().values()]


def test_a_plan_of_another_device_is_left_alone(folder: Path) -> None:
    path = folder / "plans.json"
    made = before.planned("by bytes alone", path)
    assert not made.reused
    found = json.loads(path.read_text(encoding="utf-8"))["plans"]
    assert len(found) == len(before.PLANS) + 1 and found.items() >= kept_plans().items()
    assert not list(folder.glob("*damaged*"))


# -- reports --------------------------------------------------------------------------------


def test_quality_reports_are_read_and_written_as_they_were(tmp_path: Path) -> None:
    report = QualityReport.from_json(HERE / "quality.json")
    assert [row.kind for row in report.rows] == ["fp16", "q8", "q4"]
    table = read_csv(HERE / "quality.csv")
    assert [row.kind for row in table] == ["fp16", "q8", "q4"]
    assert [row.mean_kl for row in table] == [row.mean_kl for row in report.rows]
    report.to_json(tmp_path / "quality.json")
    report.to_csv(tmp_path / "quality.csv")
    for name in ("quality.json", "quality.csv"):
        assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


def test_finished_parts_of_a_measurement_are_taken_up(folder: Path) -> None:
    """Nothing is measured again; parts of another version of the package are refused with the reason."""
    version = recorded("quality/manifest.json")["version"]
    if version != metadata.version("caramba-fast"):
        with pytest.raises(ValueError, match=f"version is '{version}', not"):
            before.measured(folder / "quality")
        return
    found, wanted = (
        before.measured(folder / "quality"),
        QualityReport.from_json(HERE / "quality.json"),
    )
    now, then = (
        {path.name: path.read_bytes() for path in (place / "quality").glob("*.npz")}
        for place in (folder, HERE)
    )
    assert now == then
    for row, kept in zip(found.rows, wanted.rows, strict=True):
        np.testing.assert_allclose(
            [row.nll, row.mean_kl, row.ppl_ratio], [kept.nll, kept.mean_kl, kept.ppl_ratio]
        )


def test_a_report_of_a_run_is_replaced_by_one_that_says_the_same(folder: Path) -> None:
    list(run_manifest(read_manifest(before.MANIFEST), folder))  # without force
    now, then = (json.loads((place / "run.json").read_text()) for place in (folder, HERE))
    assert now["texts"] == then["texts"] and now["settings"] == then["settings"]
    for part in ("metrics", "report", "environment"):
        assert now[part].keys() == then[part].keys()
    assert now.keys() == then.keys()
