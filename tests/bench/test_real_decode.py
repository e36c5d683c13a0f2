"""Decode steps of real models: every program takes its steps, and the page says what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from caramba_fast.bench.kernels.table import read
from caramba_fast.bench.out import write_table
from caramba_fast.bench.pages import real_decode_page, report
from caramba_fast.bench.real import (
    decode,
    first_token,
    gguf_types,
    llama_cpp,
    models,
    openvino_genai,
)
from caramba_fast.bench.real import weights as few_bits
from caramba_fast.models.demos import demo_path


@pytest.fixture(scope="module")
def rows():
    """Two contexts of the demo model."""
    pytest.importorskip("transformers")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for part in decode.decode(
            str(demo_path()), (64, 256), torch.float32, rounds=3, budget_s=60
        ):
            found += part
            patch.setattr(decode, "COMPILED", ())  # a program for every context takes half a minute
    assert {row["context"] for row in found if "compiled" in row["program"]} == {64}
    return found


def test_every_program_takes_its_steps_at_every_context(rows):
    named = {(row["context"], row["program"], row["cache"]): row for row in rows}
    for context in (64, 256):
        for program, caches in (
            ("accelerate", decode.ACCELERATED),
            ("Generator", decode.GENERATOR),
        ):
            for cache in caches:
                row = named[context, program, cache]
                assert row["samples"] == 3 * decode.STEPS
                assert float(row["tokens_per_s"]) > 0 and float(row["vs_dynamic"]) > 0
        assert named[context, "transformers", "dynamic"]["vs_dynamic"] == "1.000"
        eager = named[context, "transformers", "dynamic eager"]
        assert float(eager["vs_dynamic"]) > 0 and eager["samples"] == 3 * decode.STEPS
        for weights in decode.WEIGHTS if find_spec("torchao") else (decode.PACKED,):
            for program, cache in (("transformers", "dynamic"), ("accelerate", "q4")):
                row = named[context, f"{program} {weights} weights", cache]
                assert row["weights"] == weights
                assert row["cache_bytes"] == named[context, program, cache]["cache_bytes"]
    sizes = [named[256, "accelerate", kind]["cache_bytes"] for kind in ("q4", "q8", "bf16")]
    assert (
        sizes == sorted(sizes) and sizes[-1] < named[256, "transformers", "dynamic"]["cache_bytes"]
    )


def test_eager_steps_leave_the_model_its_own_attention():
    pytest.importorskip("transformers")
    from support.hf_matrix import tiny

    hf_decode, model, seen = decode.hf_decode, tiny("llama"), []
    model.register_forward_pre_hook(lambda *_: seen.append(model.config._attn_implementation))
    cache = hf_decode.transformers.DynamicCache(config=model.config)
    hf_decode.take_steps(model, hf_decode.Entry("dynamic eager", cache, False, "eager"), 2)
    assert seen == ["eager"] * 3 and model.config._attn_implementation == "sdpa"


def test_contexts_beyond_the_positions_of_a_model_are_left_out_with_a_line(monkeypatch, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setattr(decode, "GENERATOR", ())
    monkeypatch.setattr(decode, "ACCELERATED", ("q4",))
    found = list(decode.decode(str(demo_path()), (64, 10**6), torch.float32, 1, 1))
    assert [part[0]["context"] for part in found] == [64]
    assert "1000000 tokens are left out" in capsys.readouterr().out


def test_the_page_has_speed_sizes_and_first_tokens(rows, tmp_path):
    folder = tmp_path / "real"
    unknown = {**rows[0], "program": "OpenVINO GenAI", "cache": "f16", "cache_bytes": None}
    write_table(folder / f"demo{real_decode_page.DECODE}", decode.COLUMNS, [*rows, unknown])
    first = {
        "model": "Demo", "prompt": 64, "program": "accelerate", "cache": "q4", "first_token_s": "0.250",
        "vs_dynamic": "1.100", "held_mib": "300", "peak_mib": "321",
    }  # fmt: skip
    write_table(folder / f"demo{real_decode_page.FIRST_TOKEN}", first_token.COLUMNS, [first])
    cost = {"ppl_ratio": [1.25, 1.2, 1.3], "mean_kl": [0.05, 0.04, 0.06], "top1_agreement": [0.9, 0.8, 1.0],
            "acceptance": [0.95, 0.9, 1.0]}  # fmt: skip
    assert real_decode_page.WEIGHTS_TEXT not in "\n".join(real_decode_page.section(folder))
    (folder / f"demo{real_decode_page.WEIGHTS}").write_text(
        json.dumps({"about": {"title": "Demo", "windows": 4}, "weights": {"int4": cost}})
    )
    page = "\n".join(real_decode_page.section(folder))
    assert "| Demo | 4 | int4 | 1.2500 (1.2000–1.3000) | 50.0 | 90.0% | 95.0% |" in page
    assert "OpenVINO GenAI f16" in page
    assert real_decode_page.GENAI_TEXT in page
    row = next(
        r for r in rows if (r["context"], r["program"], r["cache"]) == (256, "accelerate", "q4")
    )
    reached = f"{float(row['tokens_per_s']):.1f} · {float(row['vs_dynamic']):.2f}×"
    (line,) = (x for x in page.splitlines() if x.startswith("| accelerate q4 |") and "×" in x)
    assert line.endswith(f" {reached} |") and "| tokens/s | 64 tokens | 256 tokens |" in page
    assert ("accelerate q4, int4 weights" in page) == bool(find_spec("torchao"))
    assert "| Demo | accelerate q4 | 0.25 · 1.10× | 300 | 321 |" in page
    csv = tmp_path / "cpu.csv"
    csv.write_text("device,implementation\n")
    assert page in report.report([csv])
    assert not real_decode_page.section(tmp_path)
    pytest.importorskip("matplotlib")
    real_decode_page.draw(folder, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    head = "\n".join(real_decode_page.headline(folder))
    mib = int(row["cache_bytes"]) / 2**20
    assert f"{float(row['tokens_per_s']):.1f} · {mib:.1f}" in head and "DynamicCache" in head
    assert f"| {float(unknown['tokens_per_s']):.1f} |" in head
    with pytest.raises(ValueError, match=r"decode\.csv"):
        real_decode_page.draw(tmp_path, tmp_path / "none.png")


def test_the_page_has_other_programs_by_the_type_of_their_weights(rows, tmp_path):
    write_table(tmp_path / f"demo{real_decode_page.DECODE}", decode.COLUMNS, rows)

    def row(what, program, weights, median, times):
        return {"model": "Demo", "what": what, "tokens": 1024, "program": program, "weights": weights,
                "median_ms": median, "vs_generator": times}  # fmt: skip

    found = [
        row("step", "Generator compiled int4 weights", "int4", "20.0", "1.000"),
        row("step", "llama.cpp", "Q4_0, output Q8_0", "10.0", "2.000"),
        row("step", "OpenVINO GenAI", "Q4_0, output Q8_0", "40.0", "0.500"),
        row("prompt", "Generator", "bfloat16", "1250.0", "1.000"),
        row("prompt", "llama.cpp", "Q4_0, output Q8_0", "2500.0", "0.500"),
    ]
    write_table(tmp_path / f"demo{real_decode_page.GGUF_TYPES}", gguf_types.COLUMNS, found)
    page = "\n".join(real_decode_page.section(tmp_path))
    assert "| model | tokens | Generator | llama.cpp Q4_0 | OpenVINO GenAI Q4_0 |" in page
    assert "| Demo | step, 1,024 | 50.0 | 2.00× | 0.50× |" in page
    assert "| Demo | prompt, 1,024 | 1.25 s | 0.50× |  |" in page


def test_weights_that_are_measured_again_leave_the_others(monkeypatch, tmp_path):
    cost = {"ppl_ratio": [1.0, 1.0, 1.0]}
    monkeypatch.setattr(few_bits, "RESULTS", tmp_path)
    monkeypatch.setattr(few_bits, "why_not_quantized", lambda: None)
    monkeypatch.setattr(few_bits, "study", lambda name, count, some: dict.fromkeys(some, cost))
    last = list(few_bits.GGUF)[-1]
    few_bits.main(["smollm2", "--weights", last])
    few_bits.main(["smollm2", "--weights", "int4", "--weights", "bf16"])
    file = tmp_path / "smollm2-weights.json"
    assert list(json.loads(file.read_text())["weights"]) == ["bf16", "int4", last]
    few_bits.main(["smollm2", "--weights", "int4", "--windows", "3"])  # other text: nothing stays
    assert list(json.loads(file.read_text())["weights"]) == ["int4"]


class Context:
    """What llama-cpp-python's context does of what is asked of it."""

    def __init__(self, path, **options):
        self.path, self.options, self.n_tokens, self.model, self.seen = path, options, 0, self, []

    def eval(self, ids):
        self.seen += ids
        self.n_tokens += len(ids)


@pytest.fixture
def peer(monkeypatch):
    sizes = {"n_layer": 2, "n_head_kv": 3, "n_embd": 128, "n_head": 4}
    calls = {f"llama_model_{name}": lambda _, size=size: size for name, size in sizes.items()}
    types = {name: index for index, (name, _) in enumerate(llama_cpp.KINDS.values())}
    package = SimpleNamespace(__version__="0", Llama=Context, **calls, **types)
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setattr(llama_cpp, "four_bits", lambda gguf, layers: (gguf, layers))
    return package


def test_llama_cpp_has_its_context_its_kind_and_its_bytes(peer, tmp_path):
    found = llama_cpp.LlamaCpp(tmp_path / "m.gguf", "q8_0", 500, [7, 8, 9])
    assert found.model.options["type_k"] == found.model.options["type_v"] == peer.GGML_TYPE_Q8_0
    assert found.model.options["flash_attn"] is True
    without = llama_cpp.LlamaCpp(tmp_path / "m.gguf", "f16 -fa off", 500, [7, 8, 9])
    assert without.model.options["flash_attn"] is False
    found.lengthen(5)
    found.lengthen(10)
    assert found.model.seen == [7, 8, 9, 7, 8, 9, 7, 8, 9, 7]
    assert len(found.take(3)) == 3 and found.length == 14
    assert found.nbytes() == 2 * 2 * 3 * 32 * 14 * 34 // 32
    assert found.weights == "Q4_0"


@pytest.fixture
def genai(monkeypatch):
    """What OpenVINO GenAI does of what is asked of it; `asked` has its prompts and options."""
    asked = []

    class Pipeline:
        def __init__(self, path, device, **options):
            asked.append((path, device, options))

        def generate(self, prompt, options):
            asked.append((prompt.tolist(), options))
            raw = SimpleNamespace(
                m_durations=[1000.0 * i for i in range(1, options["max_new_tokens"])]
            )
            return SimpleNamespace(perf_metrics=SimpleNamespace(raw_metrics=raw))

    package = SimpleNamespace(
        __version__="0", LLMPipeline=Pipeline, SchedulerConfig=SimpleNamespace, GenerationConfig=dict, asked=asked
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "openvino_genai", package)
    monkeypatch.setitem(sys.modules, "openvino", SimpleNamespace(Tensor=lambda x: x))
    monkeypatch.setattr(openvino_genai, "four_bits", lambda gguf, layers: (gguf, layers))
    return package


def test_openvino_genai_has_its_context_its_kind_and_threads(genai, tmp_path):
    found = openvino_genai.OpenVinoGenAI(tmp_path / "m.gguf", "u4", 500, [7, 8, 9])
    path, device, options = genai.asked[0]
    assert (path, device) == (str(tmp_path / "m.gguf"), "CPU")
    assert options["KV_CACHE_PRECISION"] == "u4"
    assert options["INFERENCE_NUM_THREADS"] == torch.get_num_threads()
    assert options["scheduler_config"].enable_prefix_caching is True
    assert options["scheduler_config"].max_num_batched_tokens > 500, "a prompt is one pass"
    found.lengthen(5)
    assert found.take(3) == [0.002, 0.003, 0.004]
    (_, first), (prompt, second) = genai.asked[1:]
    assert first["max_new_tokens"] == 1 and prompt == [[7, 8, 9, 7, 8]]
    assert second == {"max_new_tokens": 5, "do_sample": False, "ignore_eos": True}
    assert found.nbytes() is None and found.weights == "Q4_0"


def test_other_programs_get_layers_of_4_bits_and_an_output_matrix_of_8(tmp_path):
    gguf = pytest.importorskip("gguf")
    file, kinds = tmp_path / "model.gguf", gguf.GGMLQuantizationType
    numbers = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_token_list(["a", "b"])
    writer.add_rope_freq_base(5e5)
    stored = {
        "blk.0.norm": kinds.F32, "blk.0.up": kinds.Q5_0, "blk.0.down": kinds.Q4_1, "output": kinds.Q5_0
    }  # fmt: skip
    for name, kind in stored.items():
        data = numbers[0] if kind == kinds.F32 else gguf.quants.quantize(numbers, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    made, what = few_bits.four_bits(file, "Q4_1")
    assert what == "Q4_1, output Q8_0" and made == tmp_path / "model.q4_1.gguf"
    assert few_bits.four_bits(file, "Q4_1") == (made, what)
    assert few_bits.four_bits(made, "Q4_1") == (made, what)
    other, what = few_bits.four_bits(file)
    assert what == "Q4_0, output Q8_0" and other == tmp_path / "model.q4_0.gguf"
    found = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(other).tensors}
    assert found["blk.0.up"] == found["blk.0.down"] == kinds.Q4_0 and found["output"] == kinds.Q8_0
    before, after = gguf.GGUFReader(file), gguf.GGUFReader(made)

    def fields(reader):
        kept = {n: f.contents() for n, f in reader.fields.items() if n[:4] != "GGUF"}
        return {n: x for n, x in kept.items() if n != "general.file_type"}

    assert fields(after) == fields(before)
    assert after.fields["general.file_type"].contents() == gguf.LlamaFileType.MOSTLY_Q4_1
    types = {tensor.name: tensor.tensor_type for tensor in after.tensors}
    assert types == {**stored, "blk.0.up": kinds.Q4_1, "output": kinds.Q8_0}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        values = [gguf.quants.dequantize(t.data, t.tensor_type) for t in (old, new)]
        assert abs(values[1] - values[0]).max() < 0.2
        assert old.tensor_type != new.tensor_type or abs(values[1] - values[0]).max() == 0


@pytest.mark.parametrize("name", ["int8", "int4", "int4, output too"])
def test_quantized_weights_are_read_as_their_kernels_have_them(name):
    if few_bits.why_not_quantized() is not None:
        pytest.skip(few_bits.why_not_quantized())
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.layer, model.lm_head = (torch.nn.Linear(64, 96, bias=False).bfloat16() for _ in range(2))
    plain = model.lm_head.weight.detach().float()
    few_bits.quantize(model, name)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    for part in (model.layer, model.lm_head):
        wanted = x.float() @ few_bits.dequantized(part).t()
        assert (part(x).float() - wanted).norm() < 5e-3 * wanted.norm()
    assert isinstance(model.lm_head, few_bits.Int8Linear) == (name == "int4")
    error = (few_bits.dequantized(model.lm_head) - plain).norm() / plain.norm()
    assert error < (0.1 if "too" in name else 0.01)
    with pytest.raises(ValueError, match="has a bias"):
        few_bits.Int8Linear(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="unknown weights 'int5'; known are int8, int4"):
        few_bits.quantize(model, "int5")


def test_other_programs_run_once_for_each_cache_or_say_why_not(
    monkeypatch, peer, genai, tmp_path, capsys
):
    assert decode.peers_of("a folder", 64, [1]) == []
    assert "no GGUF file" in capsys.readouterr().out
    monkeypatch.setattr(decode, "gguf_file", lambda name: tmp_path / "m.gguf")
    monkeypatch.setattr(decode, "find_spec", lambda name: None)
    assert decode.peers_of("smollm2", 64, [1]) == []
    said = capsys.readouterr().out
    assert "llama-cpp-python is missing" in said and "openvino-genai is missing" in said
    monkeypatch.setattr(decode, "find_spec", lambda name: True)
    peers = decode.peers_of("smollm2", 64, [7, 8])
    assert [(p.program, p.kind) for p in peers] == [
        *(("llama.cpp", kind) for kind in llama_cpp.KINDS),
        *(("OpenVINO GenAI", kind) for kind in openvino_genai.KINDS),
    ]
    some = decode.peers_of("smollm2", 64, [7, 8], (("f16",), ("u8",)), "Q4_0")
    assert [(p.kind, p.weights) for p in some] == [("f16", "Q4_0"), ("u8", "Q4_0")]
    entries = [attempt.make() for attempt in decode.in_peers(peers, 64)]
    assert [entry.nbytes() is None for entry in entries] == [False] * 4 + [True] * 3
    assert list(decode.in_peers(peers, 65)) == []
    assert "OpenVINO GenAI u4: 65 tokens are left out" in capsys.readouterr().out


def test_a_gguf_file_is_kept_whole_or_not_at_all(monkeypatch, tmp_path):
    with pytest.raises(models.FetchError, match="unknown model 'no such'"):
        models.gguf_file("no such", tmp_path)
    calls = []

    def assembled(source, work, download):
        calls.append(source)
        (work / "model.gguf").write_bytes(b"GGUF")
        return work / "model.gguf"

    monkeypatch.setattr(models, "assemble", assembled)
    file = models.gguf_file("smollm2", tmp_path)
    assert file.read_bytes() == b"GGUF" and models.gguf_file("smollm2", tmp_path) == file
    assert len(calls) == 1 and not list(tmp_path.glob("*.part"))


def test_first_tokens_come_from_processes_of_their_own(monkeypatch, tmp_path):
    asked = []

    def process(name, prompt, dtype, program, cache):
        asked.append((program, cache))
        return {"seconds": 0.5 if program == "transformers" else 0.25, "held": 2**29, "peak": 2**30}

    monkeypatch.setattr(first_token, "_process", process)
    monkeypatch.setattr(first_token, "find_spec", lambda _: None)
    monkeypatch.setattr(first_token, "why_not_packed", lambda _: None)
    first_token.first_tokens("smollm2", [128], "float32", tmp_path / "out.csv")
    found = read(tmp_path / "out.csv")
    assert asked == [*first_token.PROGRAMS] * first_token.ROUNDS
    assert [row["vs_dynamic"] for row in found] == ["1.000"] * 2 + ["2.000"] * 5
    assert {(row["held_mib"], row["peak_mib"]) for row in found} == {("512", "1024")}
    asked.clear()
    monkeypatch.setattr(first_token, "why_not_packed", lambda _: "not on this processor")
    first_token.first_tokens("smollm2", [128], "float32", tmp_path / "out.csv")
    assert len(asked) == 5 * first_token.ROUNDS and not any("packed" in x for x, _ in asked)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_process_is_its_own():
    first_token.begin_peak()
    before = first_token.peak_bytes()  # other tests of this process have left memory of theirs
    held = torch.ones(3 * 2**29, dtype=torch.uint8)
    assert first_token.peak_bytes() > before + held.numel() - 2**28
    del held
    first_token.begin_peak()
    assert first_token.peak_bytes() < before + 2**28
    code = "from caramba_fast.bench.real.first_token import peak_bytes; import torch; print(peak_bytes())"
    more = code.replace("print", "x = torch.ones(2**30, dtype=torch.uint8); print", 1)
    small, large = (
        int(subprocess.run([sys.executable, "-c", text], capture_output=True, check=True).stdout)
        for text in (code, more)
    )
    assert small < 2**30 and 2**29 < large - small < 2**31
