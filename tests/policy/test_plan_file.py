"""Plans that are kept: found again without measuring, probed, and safe among processes and damage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.plans import GATED, any_plan, choose, make

from caramba_fast.infer import Generator
from caramba_fast.models import Transformer
from caramba_fast.policy import (
    PlanFile,
    PlanFileError,
    PlanKey,
)
from caramba_fast.policy import measure as gates_module
from caramba_fast.policy.plan import SCHEMA_VERSION, model_identity

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models: threads that wait for each other take longer than the work where others run too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plans.json"


@pytest.fixture(autouse=True)
def _few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates_module, "FEWEST_WINDOWS", 8)


# -- found again ----------------------------------------------------------------------------


def test_a_second_run_reuses_the_plan_without_running_the_model(path: Path) -> None:
    model = make()
    first = choose(model, path)
    assert model.forwards > 20 and not first.reused
    model.forwards = 0
    again = choose(model, path)
    assert model.forwards == 0 and again.reused
    assert again == first.model_copy(update={"reused": True})
    assert "kept plan" in again.describe() and "measured over 7" in first.describe()
    same = make()  # another object with the same weights
    assert choose(same, path).reused and same.forwards == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seq_len": 65}, {"batch_size": 2}, {"cache_budget_mb": 100}, {"seed": 1},
        {"cache_quality_max_mean_kl": 9.0}, {"cache_auto_candidates": ("q8",)}, {"prefill": "stored"},
        {"calibration_ids": [1, 2, 3, 4] * 40},
    ],
    ids=str,
)  # fmt: skip
def test_what_a_plan_depends_on_makes_another(path: Path, changes: dict[str, Any]) -> None:
    model = make()
    choose(model, path)
    other = choose(model, path, **changes)
    assert not other.reused
    assert len(json.loads(path.read_text())["plans"]) == 2
    assert choose(model, path).reused and choose(model, path, **changes).reused


def test_another_model_device_or_version_is_another_plan(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    choose(model, path)
    assert not choose(make(seed=4), path).reused
    assert not choose(make(num_hidden_layers=1), path).reused
    for name in ("device_identity", "versions"):
        with monkeypatch.context() as patch:
            found: Any = "a toaster" if name == "device_identity" else {"torch": "9"}
            patch.setattr(f"caramba_fast.policy.measure.{name}", lambda *_, found=found: found)
            assert not choose(model, path).reused
    assert choose(model, path).reused
    last = list(model.parameters())[-1]
    last.data[0] += 0.5
    assert not choose(model, path).reused


@pytest.mark.parametrize(
    "change",
    [
        {"rope": {"rope_type": "linear", "factor": 8.0}}, {"rms_norm_eps": 1e-3},
        {"sliding_window": 16, "model_type": "mistral"},
    ],
    ids=str,
)  # fmt: skip
def test_models_that_differ_in_their_configuration_alone_have_plans_of_their_own(
    path: Path, change: dict[str, Any]
) -> None:
    choose(make(), path)
    assert choose(make(), path).reused and not choose(make(**change), path).reused


def test_a_plan_that_does_not_say_its_models_configuration_stays_as_it_is(path: Path) -> None:
    choose(make(), path)
    (plan,) = (content := json.loads(path.read_text()))["plans"].values()
    assert len(plan["key"].pop("config_digest")) == 16
    path.write_text(json.dumps(content))
    assert choose(make(), path).reused
    file = PlanFile(path)
    found = file.get(PlanKey(**plan["key"]))
    assert found is not None
    file.put(found)
    assert any(
        kept["key"] == plan["key"] for kept in json.loads(path.read_text())["plans"].values()
    )


def test_who_gives_no_text_takes_a_plan_made_on_one(path: Path) -> None:
    model = make()
    choose(model, path, calibration_ids=[1, 2, 3, 4] * 40)
    assert choose(model, path).reused
    assert not choose(model, path, calibration_ids=[4, 3, 2, 1] * 40).reused


def test_the_same_model_behind_an_adapter_is_told_by_its_weights() -> None:
    class Adapter:
        def __init__(self, inner: Transformer) -> None:
            self.inner, self.vocab_size = inner, inner.vocab_size
            self.cache_layout = inner.cache_layout

    adapters: Any = [Adapter(make(seed)) for seed in (3, 3, 4)]
    first, same, other = map(model_identity, adapters)
    assert first == same != other and "vocabulary 97" in first


# -- probing --------------------------------------------------------------------------------

PROBED: dict[str, Any] = dict(cache_plan_probe=True, cache_plan_probe_interval_sec=60.0)


def aged(path: Path, seconds: float) -> None:
    """Makes every plan of the file look older."""
    content = json.loads(path.read_text())
    for plan in content["plans"].values():
        plan["made_at"] -= seconds
        plan["probed_at"] -= seconds
    path.write_text(json.dumps(content))


def fake_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    from caramba_fast.policy.measure import Subject
    from caramba_fast.policy.timing import StepTime

    def times(self: Subject, specs: Any) -> Any:
        found = {spec: seconds.get(spec, 1.0) for spec in ("fp16", *specs)}
        return {spec: StepTime(s, s, s) for spec, s in found.items()}

    monkeypatch.setattr(Subject, "times", times)


def test_a_plan_is_probed_when_its_interval_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, q8_0=0.5)
    model = make()
    made = choose(model, path, **PROBED)
    model.forwards = 0
    assert choose(model, path, **PROBED).probed_at == made.probed_at and model.forwards == 0
    aged(path, 61)
    probed = choose(model, path, **PROBED)
    assert probed.reused and probed.spec == "q8_0" and 0 < model.forwards < 40
    assert probed.probed_at >= made.probed_at > probed.made_at
    model.forwards = 0
    assert choose(model, path, **PROBED).reused and model.forwards == 0  # its date is new
    aged(path, 10**6)
    assert choose(model, path).reused and model.forwards == 0  # who does not probe trusts it


def test_a_plan_that_no_longer_wins_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, q8_0=0.5, q4_0=0.6)
    made = choose(make(), path, **PROBED)
    assert made.spec == "q8_0" and made.runner_up == "q4_0"
    fake_times(monkeypatch, q8_0=0.5, q4_0=0.46)  # within the margin: no flapping
    aged(path, 61)
    assert choose(make(), path, **PROBED).reused
    fake_times(monkeypatch, q8_0=0.5, q4_0=0.4)
    aged(path, 61)
    anew = choose(make(), path, **PROBED)
    assert not anew.reused and anew.spec == "q4_0"
    assert choose(make(), path).spec == "q4_0"


def test_a_plan_whose_gates_no_longer_hold_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, q4_0=0.1)
    assert choose(make(), path, **PROBED).spec == "q4_0"
    monkeypatch.setattr("caramba_fast.policy.choose.gates.clearly_fails", lambda *_: True)
    aged(path, 61)
    assert not choose(make(), path, **PROBED).reused


# -- the file -------------------------------------------------------------------------------


def test_plans_survive_the_file_and_each_other(path: Path) -> None:
    plans = [any_plan(name) for name in "abc"]
    for plan in plans:
        PlanFile(path).put(plan)
    assert [PlanFile(path).get(plan.key) for plan in plans] == plans
    newer = any_plan("b", spec="fp16")
    PlanFile(path).put(newer)
    assert PlanFile(path).get(newer.key) == newer and PlanFile(path).get(plans[0].key) == plans[0]
    content = json.loads(path.read_text())
    assert content["schema_version"] == SCHEMA_VERSION and len(content["plans"]) == 3
    assert {file.name for file in path.parent.iterdir()} <= {"plans.json", "plans.json.lock"}
    assert PlanFile(path).get(any_plan("d").key) is None


DAMAGE = {
    "no JSON": b"{]",
    "half a file": b'{"schema_version": 1, "plans": {"a": {"spec"',
    "no text": b"\xff\xfe\x00",
    "empty": b"",
    "another file": b"[1, 2]",
    "no plans": b'{"schema_version": 1}',
    "a later version": b'{"schema_version": 99, "plans": {}}',
    "a damaged plan": b'{"schema_version": 1, "plans": {"a": {"spec": 3}}}',
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_reported_set_aside_and_rebuilt(name: str, path: Path) -> None:
    path.write_bytes(DAMAGE[name])
    path.with_name("plans.json.damaged-1").write_text("an earlier one")
    model = make()
    with pytest.warns(UserWarning, match=r"plans\.json cannot be used .* moved to .*damaged-2"):
        plan = choose(model, path)
    assert not plan.reused and path.with_name("plans.json.damaged-2").read_bytes() == DAMAGE[name]
    assert path.with_name("plans.json.damaged-1").read_text() == "an earlier one"
    assert choose(model, path).reused


@pytest.mark.parametrize(
    "content", [b"notes of mine\n", b"[tool]\na = 1\n", b'"text"', b"\x89PNG\r\n", b"7"]
)
def test_a_file_that_never_held_plans_is_refused_and_stays(content: bytes, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match="is another file, no file of plans, and stays"):
        choose(make(), path)
    assert path.read_bytes() == content
    assert {file.name for file in path.parent.iterdir()} <= {"plans.json", "plans.json.lock"}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_damaged_file_behind_a_link_is_set_aside_beside_itself(tmp_path):
    """It may be on another filesystem than the link. Links to one file share its lock."""
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    (there / "plans.json").write_text('{"plans": {')
    (here / "link.json").symlink_to(there / "plans.json")
    PlanFile(here / "link.json").put(any_plan("a"))
    assert {x.name for x in here.iterdir()} == {"link.json"}
    assert {"plans.json", "plans.json.damaged-1"} <= {x.name for x in there.iterdir()}
    assert PlanFile(there / "plans.json").get(any_plan("a").key) is not None


def test_a_damaged_file_that_cannot_be_renamed_is_an_error_that_names_it(tmp_path, monkeypatch):
    path = tmp_path / "plans.json"
    path.write_text('{"plans": {')

    def denied(self, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", denied)
    with pytest.raises(PlanFileError, match=r"plans\.json: cannot rename it \(Permission denied\)"):
        PlanFile(path).get(any_plan("a").key)


@pytest.mark.parametrize("change", [{"spec": "fp16"}, {"nbytes": 5}])
def test_a_plan_that_takes_what_its_rows_rejected_is_damaged(
    change: dict[str, Any], path: Path
) -> None:
    """As one that was edited by hand: it would be over the budget, or fail a gate."""
    model, settings = make(), {"max_seq_len": 256, "cache_budget_mb": 0.04}
    choose(model, path, **settings)
    content = json.loads(path.read_text())
    next(iter(content["plans"].values())).update(change)
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="a plan in it is damaged: its rows do not say that"):
        plan = choose(model, path, **settings)
    assert not plan.reused and plan.nbytes <= 0.04 * 2**20


def test_a_generator_takes_no_plan_over_its_budget(path: Path) -> None:
    """Whatever a file says of its size."""
    model = make()
    settings = dict(
        **GATED, cache="auto", max_seq_len=256, cache_budget_mb=0.04, cache_plan_path=path,
        max_new_tokens=2, temperature=0.0,
    )  # fmt: skip
    Generator(model, **settings).generate([[3, 4, 5]])
    content = json.loads(path.read_text())
    plan = next(iter(content["plans"].values()))
    plan.update(spec="fp16", nbytes=1)
    for row in plan["rows"]:
        row["status"] = "chosen" if row["spec"] == "fp16" else "slower"
        row["nbytes"] = 1
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"cache_budget_mb=0.04: a fp16 cache of 1 rows .* takes"):
        Generator(model, **settings).generate([[3, 4, 5]])


def test_a_write_that_fails_leaves_the_file_as_it_was(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PlanFile(path).put(any_plan("a"))
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PlanFileError, match=r"cannot write it \(No space left"):
        PlanFile(path).put(any_plan("b"))
    assert path.read_bytes() == before
    assert not list(path.parent.glob(".*.part"))


def test_a_folder_is_made_if_one_level_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "plans.json"
    PlanFile(path).put(any_plan("a"))
    assert path.is_file()


@pytest.mark.parametrize("where", ["nowhere/at/all.json", "file/plans.json", "folder"])
def test_a_file_that_cannot_be_used_is_one_clear_error(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    model = make()
    with pytest.raises(PlanFileError, match=r"cache_plan_path=.*cannot (read|write) it \(.*folder"):
        choose(model, tmp_path / where)
    assert model.forwards == 0  # before anything was measured


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_read_only_folder_is_an_error_unless_the_plan_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "shut"
    folder.mkdir()
    model = make()
    choose(model, folder / "plans.json")
    folder.chmod(0o555)
    try:
        assert choose(model, folder / "plans.json").reused
        with pytest.raises(PlanFileError, match="cannot write it"):
            choose(model, folder / "other.json")
    finally:
        folder.chmod(0o755)


def test_a_lock_held_too_long_is_an_error(path: Path) -> None:
    with PlanFile(path).locked(), pytest.raises(PlanFileError, match=r"held its lock for 0\.1 s"):
        PlanFile(path, timeout=0.1).put(any_plan("a"))


# -- many processes -------------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from support.plans import any_plan
from caramba_fast.policy import PlanFile
path, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for index in range(count):
    PlanFile(path).put(any_plan(f"{{name}}{{index}}"))
    assert PlanFile(path).get(any_plan(f"{{name}}{{index}}").key) is not None
"""
CHOOSER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}]
from support.plans import choose, make
model = make()
plan = choose(model, Path(sys.argv[1]))
print(plan.spec, int(plan.reused), model.forwards)
"""


def started(code: str, *arguments: object) -> subprocess.Popen[str]:
    program = code.format(tests=str(Path(__file__).parents[1]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def test_processes_that_write_at_once_lose_nothing(path: Path) -> None:
    running = [started(WRITER, path, name, 8) for name in ("left", "right")]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
    plans = json.loads(path.read_text())["plans"]
    wanted = {f"{name}{index}" for name in ("left", "right") for index in range(8)}
    assert {plan["key"]["model"] for plan in plans.values()} == wanted
    assert not list(path.parent.glob("*damaged*")) and not list(path.parent.glob(".*.part"))


def test_processes_that_choose_at_once_agree_and_one_measures(path: Path) -> None:
    running = [started(CHOOSER, path) for _ in range(2)]
    answers = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        answers.append(out.split())
    (first, *_), (second, *_) = answers
    assert first == second
    assert sorted(reused for _, reused, _ in answers) == ["0", "1"]
    assert sorted(int(forwards) > 0 for *_, forwards in answers) == [False, True]
