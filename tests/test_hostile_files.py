"""Hostile bytes in every file the package reads: something valid, or the error that is documented.

Valid files are mutated: bytes flipped, cut, doubled; values of JSON and YAML replaced by huge, deep, wrong ones. What
may not come out is any other error, much memory or a long wait. ``CARAMBA_FAST_STRESS_SECONDS`` makes it longer, and
hypothesis prints what failed.
"""

from __future__ import annotations

import ast
import copy
import io
import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.plans import any_plan

import caramba_fast
from caramba_fast import LayerKVCache
from caramba_fast.cache.sealed import is_sealed, write_sealed
from caramba_fast.config import cache_configs
from caramba_fast.infer import Generator
from caramba_fast.infer.saved import VERSION, WHAT, read_session
from caramba_fast.infer.saved_part import SessionError
from caramba_fast.infer.tokenizer import TextTokenizer
from caramba_fast.manifest import ManifestError, load_manifest
from caramba_fast.manifest.schema import is_report as is_run_report
from caramba_fast.models import CheckpointError, ModelConfig, Transformer, demo_path, load_model
from caramba_fast.models.demos import load_tokenizer
from caramba_fast.models.registry import sketch
from caramba_fast.policy.plan_file import PlanFile, PlanFileError
from caramba_fast.quality import CacheQuality, QualityReport
from caramba_fast.quality.compare import Scores
from caramba_fast.quality.report import is_report, read_csv
from caramba_fast.quality.store import ScoreStore
from caramba_fast.quality.text import Batch

SECONDS = float(os.environ.get("CARAMBA_FAST_STRESS_SECONDS", "1.5"))
#: Bytes one read may add to the process, and seconds it may take on a busy machine.
MEMORY, PATIENCE = 200 * 2**20, 20.0
CONFIG = ModelConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4,
)  # fmt: skip
MANIFEST = """
targets:
  - name: t
    model: demo
    runs:
      - &one {id: a, prompts: [x], generate: {max_new_tokens: 2, temperature: 0.5, stop: ["."]}}
      - <<: *one
        id: b
"""


@dataclass(frozen=True)
class Format:
    """A file the package reads.

    Attributes:
        make: writes a valid folder.
        file: the one in it that is mutated.
        read: reads it.
        errors: what it may raise.
        readers: functions of the package that read such files, ``module:function``.
    """

    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]
    errors: tuple[type[Exception], ...]
    readers: tuple[str, ...]


def checkpoint(folder: Path, sharded: bool = False) -> None:
    torch.manual_seed(0)
    state = Transformer(CONFIG).state_dict()
    (folder / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "pad_token_id": 0}')
    if not sharded:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = sorted(state), {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"model-{index}.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def plans(folder: Path) -> None:
    for name in ("a", "b"):
        PlanFile(folder / "plans.json").put(any_plan(name))


def read_plans(folder: Path) -> None:
    """A file that was read can be written to as well."""
    file = PlanFile(folder / "plans.json")
    plan = any_plan("a")
    found = file.get(plan.key)
    if found is not None:
        found.describe()
    file.put(any_plan("c"))
    assert file.get(any_plan("c").key) is not None


def tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_path() / name, folder / name)


def report(folder: Path) -> None:
    row = dict.fromkeys(CacheQuality.__dataclass_fields__, 0)
    row |= {"kind": "q8", "ci": {"mean_kl": (0.0, 1.0)}}
    made = QualityReport([CacheQuality(**row)], [], {"name": "x"})
    made.to_json(folder / "quality.json")
    made.to_csv(folder / "quality.csv")


def batch() -> Batch:
    return Batch(np.arange(8).reshape(2, 4), None, None)


def store(folder: Path) -> None:
    found = batch()
    kept = ScoreStore(folder, {"model": "x"})
    kept.save("q8", found, Scores(*(np.zeros(found.scored) for _ in Scores.names())))
    next(folder.glob("*.npz")).rename(folder / "part")


def read_part(folder: Path) -> None:
    kept = ScoreStore(folder, {"model": "x"})
    (folder / "part").rename(kept._file("q8", batch()))
    kept.load("q8", batch())


def read_with_template(folder: Path) -> None:
    assert TextTokenizer.of(folder).has_chat_template in (True, False)


def run_report(folder: Path) -> None:
    content = {"target": "t", "run": "a", "mode": "generate", "environment": {}}
    (folder / "a.json").write_text(json.dumps(content))


def new_layer() -> LayerKVCache:
    spec = "q8:plain,residual_len=8,sink_len=4/q4:plain,residual_len=8,sink_len=4"
    return LayerKVCache(1, 32, 64, 64, n_kv_heads=2, **cache_configs(spec))


def state(folder: Path) -> None:
    layer = new_layer()
    layer.append(torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32))
    torch.save(layer.state_dict(), folder / "state.pt")


def read_state(folder: Path) -> None:
    """Reading the archive is torch's; what comes of it is ours."""
    try:
        found = torch.load(folder / "state.pt", weights_only=True)
    except Exception:
        return
    new_layer().load_state_dict(found)


@cache
def session_model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG.model_copy(update={"head_dim": 32, "hidden_size": 64})).eval()


def session(folder: Path) -> None:
    made = Generator(session_model(), cache_kind="q4", max_seq_len=64, max_new_tokens=3, seed=1)
    made.generate([[3, 4, 5], [6]])
    made.save(folder / "session", force=True)
    about = read_session(folder / "session").about.model_dump_json()
    (folder / "about.json").write_text(about)


def read_saved(folder: Path) -> None:
    Generator.load(folder / "session", session_model()).decode_step([1, 2])


def read_sealed_again(folder: Path) -> None:
    """What a file says of its tensors was changed by somebody who knows how to make a checksum."""
    try:
        about = dict(json.loads((folder / "about.json").read_bytes()))
        tensors = read_session(folder / "session").tensors
        write_sealed(folder / "changed", WHAT, VERSION, about, tensors)
    except (ValueError, TypeError, RecursionError):
        return  # no JSON that could be put into a file
    found = Generator.load(folder / "changed", session_model())
    found.decode_step([1] * len(found.tokens))


CHECKPOINT = ("models/checkpoint.py", "models/config.py:from_file")
FORMATS: dict[str, Format] = {
    "config.json": Format(
        checkpoint, "config.json", load_model, (CheckpointError,), ("models/config.py:from_file",)
    ),
    "config.json, sketched": Format(
        checkpoint, "config.json", sketch, (CheckpointError,), ("models/config.py:from_file",)
    ),
    "generation_config.json": Format(
        checkpoint, "generation_config.json", load_model, (CheckpointError,),
        ("models/checkpoint.py:_with_generation_ids",),
    ),
    "weights": Format(
        checkpoint, "model.safetensors", load_model, (CheckpointError,),
        ("models/checkpoint.py:_described", "models/checkpoint.py:load"),
    ),
    "index": Format(
        lambda folder: checkpoint(folder, True), "model.safetensors.index.json", load_model,
        (CheckpointError,), ("models/checkpoint.py:_weight_map",),
    ),
    "shard": Format(
        lambda folder: checkpoint(folder, True), "model-1.safetensors", load_model,
        (CheckpointError,), ("models/checkpoint.py:_described", "models/checkpoint.py:load"),
    ),
    "plans": Format(
        plans, "plans.json", read_plans, (PlanFileError,), ("policy/plan_file.py:_parse",)
    ),
    "manifest": Format(
        lambda folder: (folder / "m.yml").write_text(MANIFEST), "m.yml",
        lambda folder: load_manifest(folder / "m.yml"), (ManifestError,),
        ("manifest/load.py:load_manifest", "manifest/load.py:_parsed"),
    ),
    "tokenizer.json": Format(
        tokenizer, "tokenizer.json", load_tokenizer, (CheckpointError,),
        ("models/demos.py:load_tokenizer",),
    ),
    "tokenizer_config.json": Format(
        tokenizer, "tokenizer_config.json", read_with_template, (),
        ("infer/tokenizer.py:_folder_has_template",),
    ),
    "quality report": Format(
        report, "quality.json", lambda folder: QualityReport.from_json(folder / "quality.json"),
        (ValueError,), ("quality/report.py:from_json",),
    ),
    "quality report, asked": Format(
        report, "quality.json", lambda folder: is_report(folder / "quality.json"), (),
        ("quality/report.py:is_report", "quality/report.py:is_table"),
    ),
    "quality table": Format(
        report, "quality.csv", lambda folder: read_csv(folder / "quality.csv"), (ValueError,),
        ("quality/report.py:read_csv",),
    ),
    "quality settings": Format(
        store, "manifest.json", lambda folder: ScoreStore(folder, {"model": "x"}), (ValueError,),
        ("quality/store.py:_claim",),
    ),
    "quality part": Format(
        store, "part", read_part, (), ("quality/store.py:load", "quality/store.py:_check_headers")
    ),
    "run report": Format(
        run_report, "a.json", lambda folder: is_run_report(folder / "a.json"), (),
        ("manifest/schema.py:is_report", "cli/bench.py:_is_details", "cli/bench.py:_is_table"),
    ),
    "cache state": Format(state, "state.pt", read_state, (ValueError,), ()),
    "session": Format(
        session, "session", read_saved, (SessionError,),
        ("cache/sealed.py:read_sealed", "cache/sealed.py:_metadata"),
    ),
    "session, asked": Format(
        session, "session", lambda folder: is_sealed(folder / "session", WHAT), (),
        ("cache/sealed.py:is_sealed",),
    ),
    "session, sealed again": Format(session, "about.json", read_sealed_again, (SessionError,), ()),
}  # fmt: skip
#: Readers of what is not handed to users by strangers, or that only hand text on.
TRUSTED = {
    "config/files.py:read_json", "config/files.py:parse_json", "config/files.py:read_at_most",  # what others go through
    "models/demos.py:with_delta", "models/demos.py:held_out_text",  # parts of the package itself
    "policy/plan.py:processor", "quality/plot.py:is_plot",  # the system's; some bytes of a file
    "manifest/prepare.py:_prompts", "cli/quality.py:read_text",  # text, which is a prompt
    "writing.py:_remove_stale", "writing.py:replacing",
    "cli/__init__.py:main",  # the null device
}  # fmt: skip
READS = {
    "read_text", "read_bytes", "read_json", "parse_json", "safe_open", "load_file", "from_file", "ZipFile",
    "DictReader", "open",
}  # fmt: skip


def readers() -> set[str]:
    """Functions of the package that open a file to read or parse one, by name."""
    root, found = Path(caramba_fast.__file__).parent, set()
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).as_posix()
        if name.startswith(("kernels/", "bench/", "hf/", "serve/", "distributed/")):
            continue
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = {
                    getattr(call.func, "attr", getattr(call.func, "id", ""))
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call)
                }
                if calls & READS or (calls & {"load"} and "allow_pickle" in ast.dump(function)):
                    found.add(f"{name}:{function.name}")
    return found


def test_no_reader_is_forgotten() -> None:
    known = {name for form in FORMATS.values() for name in form.readers}
    wrappers = {  # they call a reader above by its name
        "models/checkpoint.py:load_model", "models/registry.py:sketch", "models/registry.py:load",
        "cli/plan.py:run_plan", "cli/quality.py:run_quality",
    }  # fmt: skip
    missing = readers() - known - TRUSTED - wrappers
    assert not missing, f"readers without hostile files: {sorted(missing)}"


# -- mutations ---------------------------------------------------------------------------

HOSTILE: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, -0.0, "", "x" * 5000, "\0", "\ud800", [], {}, [[]],
    {"": {}}, 10_000_000, 0.5, "nan", [1] * 3000, "auto", "..", "/etc/passwd",
]  # fmt: skip
LITERALS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"*one",
    b"&x [*x]", b"!!int ''", b"!!python/object:os.system x", b"\xff\xfe", b"\x00", b"2024-13-45", b"1:1:1:1",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner: list[tuple[Any, ...]] = [path] if path else []
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in items:
        inner += places(child, (*path, key))
    return inner


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if new is places:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


#: Removed when the process ends.
_FOLDER = TemporaryDirectory(prefix="caramba-hostile-")


@cache
def valid(name: str) -> Path:
    folder = Path(mkdtemp(dir=_FOLDER.name))
    FORMATS[name].make(folder)
    return folder


def mutated(data: st.DataObject, name: str, content: bytes) -> bytes:
    """One to three changes of a valid file."""
    kind = data.draw(st.sampled_from(["bytes", "values"]))
    if kind == "values" and (whole := changed_values(data, name, content)) is not None:
        return whole
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        stop = min(len(content), start + data.draw(st.integers(0, 12)))
        new = data.draw(
            st.one_of(
                st.just(b""),
                st.binary(max_size=8),
                st.sampled_from(LITERALS),
                st.just(content[:400]),
            )
        )
        content = content[:start] + new + content[stop:]
        if data.draw(st.booleans()):
            content = content[: data.draw(st.integers(0, len(content)))]
    return content


def changed_values(data: st.DataObject, name: str, content: bytes) -> bytes | None:
    """JSON (that of a safetensors header too) with one value replaced or left out; None where there is none."""
    header = content[8 : 8 + struct.unpack("<Q", content[:8])[0]] if content[8:9] == b"{" else b""
    try:
        found = json.loads(header or content)
    except ValueError:
        return None
    listed = places(found)
    if name == "tokenizer.json":
        listed = listed[:400]
    path = data.draw(st.sampled_from(listed))
    new = data.draw(st.sampled_from([*HOSTILE, places]))
    text = json.dumps(replaced(found, path, new)).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + len(header) :] if header else text


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_hostile_bytes(name: str, tmp_path: Path) -> None:
    form, end = FORMATS[name], time.monotonic() + SECONDS
    content = (valid(name) / form.file).read_bytes()
    folder = tmp_path / "folder"
    shutil.copytree(valid(name), folder)
    form.read(folder)  # undamaged it is read

    @settings(
        max_examples=int(100 + 150 * SECONDS), deadline=None, database=None, print_blob=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        changed = mutated(data, name, content)
        if time.monotonic() > end:
            return
        shutil.rmtree(folder)
        shutil.copytree(valid(name), folder)
        (folder / form.file).write_bytes(changed)
        before, began = peak(), time.monotonic()
        try:
            form.read(folder)
        except form.errors as error:
            assert len(str(error)) < 4000, "a message is for reading"
        assert peak() - before < MEMORY
        assert time.monotonic() - began < PATIENCE

    check()


# -- what has been seen ------------------------------------------------------------------

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{b}: &{b} {{<<: [{','.join([f'*{a}'] * 9)}]}}\n"
    for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
SEEN: dict[str, tuple[str, Any]] = {
    "aliases": ("manifest", BOMB),
    "merges": ("manifest", MERGES),
    "aliases as a value": ("manifest", BOMB + "targets: *i\n"),
    "recursive alias": ("manifest", "targets: &a [*a]\n"),
    "deep yaml": ("manifest", "targets: " + "[" * 20_000),
    "many values": ("manifest", "targets: [" + "a," * 100_000 + "]"),
    "many wrong keys": (
        "manifest",
        "targets: [{" + ",".join(f"k{i}: 1" for i in range(9000)) + "}]",
    ),
    "a tag without a value": ("manifest", 'targets: !!int ""\n'),
    "deep plans": ("plans", '{"plans": ' + "[" * 200_000),
    "deep index": ("index", '{"weight_map": ' + "[" * 200_000),
    "ten million layers": ("config.json, sketched", {"num_hidden_layers": 10_000_000}),
    "a huge vocabulary": ("config.json, sketched", {"vocab_size": 2**31 - 1}),
    "wide heads": ("config.json, sketched", {"head_dim": 2**30}),
    "a trillion layers with windows": (
        "config.json, sketched",
        {"num_hidden_layers": 10**12, "model_type": "mistral", "sliding_window": 4},
    ),
}


@pytest.mark.parametrize("what", SEEN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_has_been_seen(what: str, tmp_path: Path) -> None:
    name, content = SEEN[what]
    form, folder = FORMATS[name], tmp_path / "folder"
    shutil.copytree(valid(name), folder)
    file = folder / form.file
    if isinstance(content, dict):
        content = json.dumps({**json.loads(file.read_text()), **content})
    file.write_text(content)
    before, began = peak(), time.monotonic()
    if name == "plans":
        form.read(folder)  # set aside, and made anew
        assert list(folder.glob("*damaged*"))
    else:
        with pytest.raises(form.errors) as caught:
            form.read(folder)
        assert len(str(caught.value)) < 4000
    assert peak() - before < MEMORY and time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("change", ["no row of its cache", "NaN", "infinity", "no cache"])
def test_a_plan_that_cannot_be_used_is_set_aside(change: str, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    PlanFile(path).put(any_plan("a"))
    found = json.loads(path.read_text())
    plan = next(iter(found["plans"].values()))
    if change == "no row of its cache":
        plan["spec"] = "fp16"
    elif change == "no cache":
        plan["spec"] = plan["rows"][0]["spec"] = "q99"
    else:
        plan["made_at"] = float("nan") if change == "NaN" else 0
        plan["key"]["settings"] = {} if change == "NaN" else {"x": float("inf")}
    path.write_text(json.dumps(found))
    with pytest.warns(UserWarning, match="cannot be used"):
        PlanFile(path).put(any_plan("b"))
    assert PlanFile(path).get(any_plan("b").key) is not None


def test_a_large_file_that_is_no_session_is_not_read(tmp_path: Path) -> None:
    """As weights given by mistake: this one takes no room on the disk, and has a TiB of zeros."""
    file = tmp_path / "weights.safetensors"
    file.touch()
    os.truncate(file, 2**40)
    with pytest.raises(SessionError, match=r"weights\.safetensors is no "):
        read_session(file)


def test_arrays_larger_than_they_are_make_no_room(tmp_path: Path) -> None:
    """A compressed part of a few KB whose header says terabytes."""
    shutil.copytree(valid("quality part"), tmp_path / "f")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    )
    import zipfile

    with zipfile.ZipFile(tmp_path / "f" / "part", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in Scores.names():
            archive.writestr(f"{name}.npy", header.getvalue() + b"\0" * 10_000)
    with pytest.warns(UserWarning, match="is damaged and measured again"):
        read_part(tmp_path / "f")
