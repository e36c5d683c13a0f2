"""Weights of 4 and 8 bits on a CPU, and their quality loss: ``python -m caramba_fast.bench.real.weights``.

Programs are compared at similar bits. The layers' matrices have 4 bits, with a scale and a zero for each 32 values 5
bits in all; the output matrix, which decides on the next token, has 8. Ours are torchao's, but for the output matrix
(`Int8Linear`). Other programs read a GGUF file with layers in Q4_0 (4.5 bits) or Q4_1 (5 bits) and other matrices in
Q8_0, converted here from the model's own if that has other types.

The loss is measured against the checkpoint in float32, all with an fp16 cache, on the text of `study`. Writes
``bench/results/real/<model>-weights.json``, from which `real_decode_page` makes a table.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from caramba_fast.bench.environment import details
from caramba_fast.bench.real.models import SOURCES, FetchError, gguf_file, model_folder, title
from caramba_fast.bench.real.study import CONTEXT, QUICK_WINDOWS, RESULTS, RUNS, WINDOWS
from caramba_fast.bench.real.text import TextError, windows
from caramba_fast.cli.quality import begin_token, load_subject
from caramba_fast.models import load_model
from caramba_fast.quality import cache_size, cached_forward
from caramba_fast.quality.compare import Scores, compare
from caramba_fast.quality.figures import cache_quality
from caramba_fast.quality.needles import token_ids

#: Values per group of 4-bit weights.
GROUP = 32
#: Names for `quantize`; files of other programs, with the type of their layers; all that is measured; the baseline.
QUANTIZED = ("int8", "int4", "int4, output too")
GGUF = {f"{layers} and Q8_0 (GGUF)": layers for layers in ("Q4_1", "Q4_0")}
MEASURED = ("bf16", *QUANTIZED, *GGUF)
BASELINE = "float32"
#: Names of models that `main` takes by default.
MODELS = ("qwen2.5-coder-0.5b", "smollm2")


class Int8Linear(nn.Module):
    """A matrix in int8, without bias, with a bf16 scale for each output; its products are bf16.

    torch multiplies it without a copy in bf16, which torchao's `Int8WeightOnlyConfig` makes unless it is compiled.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        if linear.bias is not None:
            raise ValueError("the matrix has a bias; only one without can be in int8")
        weight = linear.weight.detach().float()
        self.scale = nn.Parameter(
            (weight.abs().amax(1) / 127).clamp_min(1e-12).bfloat16(), requires_grad=False
        )
        codes = (weight / self.scale.float()[:, None]).round().clamp(-127, 127)
        self.weight = nn.Parameter(codes.to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)"""
        found = torch._weight_int8pack_mm(x.bfloat16().flatten(0, -2), self.weight, self.scale)
        return found.unflatten(0, x.shape[:-1])

    def dequantized(self) -> Tensor:
        """The weights (out, in) in float32."""
        return self.weight.float() * self.scale.float()[:, None]


def why_not_quantized() -> str | None:
    """None if torchao has 4-bit weights for CPUs, else what is missing."""
    if find_spec("torchao") is None:
        return "the package torchao is missing"
    try:
        import_module("torchao.prototype.quantization.int4.inference_workflow")
    except ImportError as error:
        return f"this torchao has no 4-bit kernels for CPUs where the one of constraints.txt has: {error}"
    return None


def quantize(model: Any, weights: str) -> None:
    """Quantizes a bf16 model in place to ``int8``, ``int4``, or ``int4, output too``; ValueError for another name."""
    if weights not in QUANTIZED:
        raise ValueError(f"unknown weights {weights!r}; known are {', '.join(QUANTIZED)}")
    torchao: Any = import_module("torchao.quantization")
    model.eval()
    if weights == "int8":
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        return
    cpu: Any = import_module("torchao.prototype.quantization.int4.inference_workflow")
    if weights == "int4":
        model.lm_head = Int8Linear(model.lm_head)
    torchao.quantize_(model, cpu.PrototypeInt4WeightOnlyConfig(group_size=GROUP))


def four_bits(gguf: Path, layers: str = "Q4_0") -> tuple[Path, str]:
    """A GGUF file of a model with layers in Q4_1 or Q4_0 and all other matrices in Q8_0, and a name for these types.

    It is written beside ``gguf``, or is ``gguf`` itself if that has these types.
    """
    package: Any = import_module("gguf")
    reader, types = package.GGUFReader(gguf), package.GGMLQuantizationType
    name = f"{layers}, output Q8_0"

    def wanted(tensor: Any) -> Any:
        if len(tensor.shape) < 2:
            return tensor.tensor_type
        return types[layers] if tensor.name.startswith("blk.") else types.Q8_0

    if all(tensor.tensor_type == wanted(tensor) for tensor in reader.tensors):
        return gguf, name
    made = gguf.with_suffix(f".{layers.lower()}.gguf")
    if made.exists():
        return made, name
    part = made.with_suffix(f".{os.getpid()}.part")
    file_type = int(package.LlamaFileType[f"MOSTLY_{layers}"])
    writer = package.GGUFWriter(part, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        inner = field.types[-1] if len(field.types) > 1 else None
        value = file_type if key == "general.file_type" else None
        writer.add_key_value(
            key, field.contents() if value is None else value, field.types[0], inner
        )
    for tensor in reader.tensors:
        data, stored = tensor.data, wanted(tensor)
        if stored != tensor.tensor_type:
            values = package.quants.dequantize(data, tensor.tensor_type)
            data = package.quants.quantize(values, stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(made)
    return made, name


def dequantized(linear: nn.Module) -> Tensor:
    """The weights (out, in) of a layer that `quantize` has made, in float32."""
    if isinstance(linear, Int8Linear):
        return linear.dequantized()
    weight: Any = linear.weight
    if not hasattr(weight, "scale_and_zero"):
        plain = weight.dequantize() if hasattr(weight, "dequantize") else weight
        return torch.Tensor(plain.detach().float())
    rows = weight.shape[1]
    product = functional.linear(torch.eye(rows, dtype=torch.bfloat16), weight).float()  # (in, out)
    # The product is rounded to bf16; the nearest codes give the weights exactly as the kernel has them.
    scale, zero = weight.scale_and_zero.float().repeat_interleave(GROUP, 0).unbind(-1)
    codes = ((product - zero) / scale + 8).round().clamp(0, 15)
    return torch.where(scale == 0, zero, (codes - 8) * scale + zero).t().contiguous()


def in_float32(name: str, weights: str) -> nn.Module:
    """A model with the weights named, dequantized, everything in float32."""
    if weights in GGUF:
        return load_model(four_bits(gguf_file(name), GGUF[weights])[0], dtype=torch.float32)
    model = load_model(model_folder(name), dtype=torch.bfloat16)
    if weights != "bf16":
        quantize(model, weights)
    for _, parent in list(model.named_modules()):
        for child, module in list(parent.named_children()):
            if isinstance(module, nn.Linear | Int8Linear):
                plain = nn.Linear(1, 1, bias=False)
                plain.weight = nn.Parameter(dequantized(module), requires_grad=False)
                plain.bias = getattr(module, "bias", None)
                setattr(parent, child, plain)
    return model.float()


def study(name: str, count: int = WINDOWS, measured: Sequence[str] = MEASURED) -> dict[str, Any]:
    """Figures of ``measured``, by name: perplexity ratio, KL in nats, shares, each with its 95% interval.

    Raises FetchError or TextError if model or text cannot be had.
    """
    subject = load_subject(str(model_folder(name)), "cpu")
    bos = begin_token(subject)
    ids = windows(
        lambda text: token_ids(subject.tokenizer, text).tolist(), CONTEXT - (bos is not None), count, "held out"
    )  # fmt: skip
    if bos is not None:
        ids = np.concatenate((np.full((len(ids), 1), bos), ids), axis=1)
    size = cache_size(subject.model.cache_layout, "fp16", CONTEXT)
    found = {}
    for weights in measured:
        forwards: dict[str, Any] = {
            BASELINE: cached_forward(subject.model),
            weights: cached_forward(in_float32(name, weights)),
        }
        scores = _scores(lambda rows, which, own=forwards: own[which](rows, "fp16"), ids, weights)
        row = cache_quality(weights, scores[weights], scores[BASELINE], size)
        names = ("ppl_ratio", "mean_kl", "top1_agreement", "acceptance")
        found[weights] = {key: [getattr(row, key), *row.ci[key]] for key in names}
        print(f"{name}, {weights}: {found[weights]}", flush=True)
    return found


def _scores(
    forward: Callable[[Tensor, str], Iterator[Tensor]], ids: np.ndarray, weights: str
) -> dict[str, Scores]:
    """Scores of the baseline and of other weights, over all windows."""
    parts = [
        compare(forward, torch.from_numpy(row[None].astype(np.int64)), [weights], BASELINE)
        for row in ids
    ]
    return {name: Scores.joined([part[name] for part in parts]) for name in (BASELINE, weights)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and measures."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(SOURCES)}")
    parser.add_argument("--windows", type=int, help=f"{WINDOWS}, or {QUICK_WINDOWS} with --quick")
    parser.add_argument(
        "--weights", action="append", choices=MEASURED, metavar="NAME",
        help="only these, one for each --weights; others of the file stay",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two windows, into runs/real/quick")
    args = parser.parse_args(arguments)
    if (reason := why_not_quantized()) is not None:
        parser.exit(1, f"{reason}\n")
    count = args.windows or (QUICK_WINDOWS if args.quick else WINDOWS)
    out = RUNS / "quick" if args.quick else RESULTS
    out.mkdir(parents=True, exist_ok=True)
    for name in args.models or MODELS:
        try:
            rows = study(name, count, args.weights or MEASURED)
        except (FetchError, TextError) as error:
            parser.exit(1, f"{name}: {error}\n")
        about = {
            "title": title(name),
            "context": CONTEXT,
            "windows": count,
            "environment": details(torch.device("cpu")),
        }
        path = out / f"{name}-weights.json"
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if before.get("about", {}).get("windows") == count:
            rows = {x: y for x in MEASURED if (y := rows.get(x, before["weights"].get(x)))}
        text = json.dumps({"about": about, "weights": rows}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
