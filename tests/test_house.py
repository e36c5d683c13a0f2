"""The house stands: what lies where, and what it may not shadow."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caramba_fast.ops.registry import _ops

ROOT = Path(__file__).resolve().parent.parent

BESIDE = """
import kernels, transformers
import caramba_fast.kernels, caramba_fast.bench
assert hasattr(kernels, "get_kernel"), kernels
assert kernels.__file__ != caramba_fast.kernels.__file__
"""


def test_kernels_is_no_package_of_its_own():
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("folder", [ROOT, Path("/")])
def test_hugging_faces_kernels_package_is_found_beside_ours(folder):
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_one_op_is_one_stem():
    for name in _ops:
        stem = name.partition(".")[0].rstrip("_").removeprefix("decoupled_")
        files = {path.stem for path in (ROOT / "caramba_fast" / "ops").glob("*.py")}
        assert {stem, f"decoupled_{stem}"} & files, name


def modules() -> dict[str, ast.Module]:
    """The files of the package by the name they are imported under."""
    found = {}
    for path in (ROOT / "caramba_fast").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


def imports(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Which files each file imports, wherever in it: inside functions and for type checkers, too."""
    found: dict[str, set[str]] = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in trees:
                parts = (f"{node.module}.{alias.name}" for alias in node.names)
                found[name] |= {part if part in trees else str(node.module) for part in parts}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in trees}
        found[name].discard(name)
    return found


def circles(edges: dict[str, set[str]]) -> list[str]:
    """What is left when files that import nothing, or are imported by nothing, are taken away again and again."""
    left = {name: set(others) for name, others in edges.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        gone = {name for name, others in left.items() if not others or name not in used}
        if not gone:
            return sorted(left)
        left = {name: others - gone for name, others in left.items() if name not in gone}


def test_no_files_import_each_other_in_a_circle():
    assert circles(imports(modules())) == []


def test_a_circle_would_be_found():
    trees = {
        "p.a": ast.parse("def f():\n    from p.b import g"),
        "p.b": ast.parse("from p.c import h"),
        "p.c": ast.parse("if TYPE_CHECKING:\n    from p import a"),
        "p.d": ast.parse("import p.a"),
        "p": ast.parse(""),
    }
    assert circles(imports(trees)) == ["p.a", "p.b", "p.c"]


@pytest.mark.parametrize(("what", "most"), [("files", 400), ("classes", 300)])
def test_nothing_is_too_long_to_read(what, most):
    found = {}
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if what == "classes" and isinstance(node, ast.ClassDef):
                found[f"{name}.{node.name}"] = node.end_lineno - node.lineno + 1
        if what == "files" and tree.body:
            found[name] = tree.body[-1].end_lineno
    assert {name: lines for name, lines in found.items() if lines > most} == {}


def test_every_dependency_has_a_lower_bound():
    """Without one, pip keeps a version that is too old for us and says nothing."""
    text = (ROOT / "pyproject.toml").read_text()
    project = text[text.index("\ndependencies = [") : text.index("[project.scripts]")]
    named = re.findall(r'"((?!caramba-fast\[)[A-Za-z][^"]*)"', project)
    assert len(named) > 12 and [name for name in named if ">=" not in name] == []


def test_every_parser_wants_options_in_full():
    """An abbreviated ``--out`` passes by what looks for that word, and means another option once there are more."""
    calls = [
        (path.name, [word.arg for word in node.keywords])
        for folder in ("bench", "caramba_fast", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser")
    ]
    assert len(calls) > 20 and [name for name, words in calls if "allow_abbrev" not in words] == []
