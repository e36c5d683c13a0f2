"""Choosing a backend: honoured or refused with the reason, and reported."""

import subprocess
import sys

import pytest
import torch

from caramba_fast import BackendError, backends, quantize, use_backend
from caramba_fast.ops import KVView, extend_attention, registry

OPS = {
    "quantize", "dequantize", "append_", "decoupled_append_", "decode_attention", "extend_attention",
    "decoupled_decode_attention", "decoupled_extend_attention", "merge_state",
    "apply_rotary_emb",
}  # fmt: skip


def status(op):
    return next(s for s in backends() if s.op == op and s.device == "cpu")


def run(code, **environment):
    import os

    env = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )


def test_every_op_is_reported_with_a_reason_for_each_backend_that_does_not_run():
    report = {s.op: s for s in backends() if s.device == "cpu"}
    assert set(report) == OPS
    for entry in report.values():
        assert {entry.runs, *entry.reasons} == {"reference", "cpp", "triton"}
        assert all(entry.reasons.values())
        assert entry.op in str(entry) and entry.runs in str(entry)


def test_cpp_serves_quantize_and_says_so():
    assert status("quantize").runs == "cpp"
    assert "interpreted Triton runs only when asked for" in status("quantize").reasons["triton"]


@pytest.mark.parametrize("name", ["reference", "cpp", "triton"])
def test_a_choice_is_used_and_ends_with_its_block(name, monkeypatch):
    calls, made = [], (torch.zeros(32, dtype=torch.int8), torch.ones(1, dtype=torch.float16))
    op = registry._ops["quantize"]
    monkeypatch.setattr(op, "reference", lambda *a: calls.append("reference") or made)
    monkeypatch.setattr(op, "overload", lambda *a: calls.append("cpp") or made)
    monkeypatch.setattr(op, "_launcher", lambda *a: calls.append("triton") or made)
    with use_backend(name):
        quantize(torch.ones(32), "q8")
        assert status("quantize").runs == name
    assert calls == [name]
    assert registry._forced is None


def test_choices_nest_and_can_be_plain_statements():
    use_backend("reference")
    with use_backend("cpp"):
        assert registry._forced == "cpp"
    assert registry._forced == "reference"
    use_backend("auto")
    assert registry._forced is None


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(BackendError, match="'fast'; known are auto, reference, cpp, triton"):
        use_backend("fast")
    assert registry._forced is None


def test_an_op_without_the_chosen_backend_raises_when_called(monkeypatch):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    monkeypatch.setattr(
        torch._C,
        "_dispatch_has_kernel_for_dispatch_key",
        lambda name, key: "extend" not in name and has(name, key),
    )
    view = KVView(torch.zeros(1, 1, 64, 32), None, "fp32")
    with (
        use_backend("cpp"),
        pytest.raises(
            BackendError,
            match=r"extend_attention cannot run on backend 'cpp'.*no kernel for this op",
        ),
    ):
        extend_attention(
            torch.zeros(1, 1, 40, 32),
            view,
            view,
            torch.tensor([40], dtype=torch.int32),
            n_kv_heads=1,
        )


def test_an_unavailable_backend_raises_with_the_reason(monkeypatch):
    monkeypatch.setattr(registry, "load_error", lambda: "not built")
    with pytest.raises(BackendError, match="'cpp' is not available: not built"):
        use_backend("cpp")
    assert status("quantize").reasons["cpp"] == "not built"


def test_triton_on_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1 is not set"):
        use_backend("triton")
    assert "TRITON_INTERPRET=1" in status("quantize").reasons["triton"]


def test_the_environment_variable_chooses_or_raises():
    asked = "import caramba_fast as c; print([s.runs for s in c.backends() if s.op == 'quantize'])"
    assert run(asked, CARAMBA_FAST_BACKEND="reference").stdout.strip() == "['reference']"
    refused = run(asked, CARAMBA_FAST_BACKEND="cuda")
    assert refused.returncode != 0 and "unknown backend 'cuda'" in refused.stderr
    absent = run(asked, CARAMBA_FAST_BACKEND="triton", TRITON_INTERPRET="0")
    assert absent.returncode != 0 and "'triton' is not available" in absent.stderr


def test_a_forced_backend_holds_inside_compiled_code():
    def both(x):
        return quantize(x, "q4")

    x = torch.randn(4, 64)
    with use_backend("reference"):
        expected = both(x)
    for name in ("auto", "reference", "cpp"):
        with use_backend(name):
            got = torch.compile(both, fullgraph=True)(x)
        assert all(map(torch.equal, got, expected))
