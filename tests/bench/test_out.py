"""Where results go: what a benchmark writes takes the place of its own earlier results alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from caramba_fast.bench.generation import speculation
from caramba_fast.bench.kernels import run
from caramba_fast.bench.kernels.table import COMMAND, Table
from caramba_fast.bench.out import check_out, write_details, write_table

ENVIRONMENT = dict.fromkeys(("device", "source", "torch", "triton"), "x")


@pytest.mark.parametrize(
    "content", ["mine", "[1]", '{"commit": "x"}', '{"command": "generation.speculation"}']
)
def test_a_json_file_of_others_beside_the_table_stays(content: str, tmp_path: Path) -> None:
    details, words = tmp_path / "x.json", ["--grid", "tiny", "--out", str(tmp_path / "x.csv")]
    details.write_text(content)
    with pytest.raises(
        FileExistsError, match=r"x\.json exists and is no result of kernels\.run.*--force"
    ):
        run.main(words)
    assert details.read_text() == content and not (tmp_path / "x.csv").exists()
    check_out([tmp_path / "x.csv"], force=True, command=COMMAND)
    check_out([tmp_path / "x.csv"], force=False)  # of a command that writes none


def test_its_own_results_are_replaced(tmp_path: Path) -> None:
    table = tmp_path / "x.csv"
    for grid in ("tiny", "quick"):
        check_out([table, None], force=False, command=COMMAND)
        made = Table(table, ENVIRONMENT)
        made.start({"grid": grid}, resume=False)
        made.add([])
    assert json.loads((tmp_path / "x.json").read_text()) == {"command": COMMAND, "grid": "quick"}
    with pytest.raises(FileExistsError, match="no result of generation"):
        speculation.main(["--out", str(table)])


def test_an_earlier_table_stays_until_something_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    earlier = Table(path, ENVIRONMENT)
    earlier.start({"grid": "tiny"}, resume=False)
    earlier.add([{"case": "a", **ENVIRONMENT}])
    there = path.read_text(), path.with_suffix(".json").read_text()
    Table(path, ENVIRONMENT).start({"grid": "quick"}, resume=False)
    assert there == (path.read_text(), path.with_suffix(".json").read_text())


def test_an_earlier_table_stays_if_the_new_one_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_table(path, ("a", "b"), [{"a": 1, "b": 2}])
    code = """if True:
        import resource, signal, sys
        from pathlib import Path
        from caramba_fast.bench.out import write_table
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        write_table(Path(sys.argv[1]), ("a", "b"), [{"a": "x" * 5000, "b": 1}])
    """
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert f"cannot write {path}: File too large; what was there is untouched" in found.stderr
    assert path.read_text() == "a,b\n1,2\n"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("place", ["/dev/null", "/dev/full"])
def test_a_device_is_no_place_for_a_table(place: str) -> None:
    with pytest.raises(FileExistsError, match=f"{place} is no regular file; the name of a file is"):
        check_out([Path(place)], force=True)


def test_a_table_and_its_details_are_two_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"x\.json; the details go there"):
        check_out([tmp_path / "x.json"], force=False, command=COMMAND)
    write_details(tmp_path / "x.csv", COMMAND, {})
    with pytest.raises(FileExistsError, match=r"x\.json exists and is no table"):
        check_out([tmp_path / "x.json"], force=False)


def test_an_option_is_written_in_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--grid", "tiny", "--ou", str(tmp_path / "x.csv")])
    assert "unrecognized arguments: --ou" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a JSON file beside it" in said and "that another command wrote" in said
