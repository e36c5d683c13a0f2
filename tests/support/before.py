"""An earlier version of the package: names, commands, texts, and the files it wrote, in ``data/before``.

`test_compatibility.py` compares the present version with it. Run from the root of the repository,

    PYTHONPATH=tests python -m support.before names commands texts

writes what can be compared as text, after an intended change: the diff shows what changes for users. ``states``,
``plans`` and ``reports`` write files of an earlier version, so they are only rewritten when a format gets a new version
and the old one is refused with a reason.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support import described
from torch import Tensor

from caramba_fast import (
    CarambaCache,
    DecoupledLayerKVCache,
    Engine,
    Generator,
    LayerKVCache,
    ModelKVCache,
    SpeculativeGenerator,
    accelerate,
    choose_cache,
    load_demo,
    load_model,
)
from caramba_fast.config import cache_configs
from caramba_fast.inference.generate import Generator as TextGenerator
from caramba_fast.manifest import read_manifest, run_manifest
from caramba_fast.models import demo_path, demo_tokenizer, held_out_text
from caramba_fast.policy import CachePlan, CachePolicyFields, PlanFile
from caramba_fast.quality import QualityReport, cached_forward, measure

HERE = Path(__file__).resolve().parents[1] / "data" / "before"
#: Key fields of a plan made on a device and with versions that no test machine has.
ELSEWHERE = {"device": "another processor, cpu, 1 threads", "versions": {"torch": "0"}}
#: Cache sizes of the plans, and the settings of the stored plans by name.
PLANNED: dict[str, Any] = dict(max_seq_len=256, batch_size=2)
PLANS: dict[str, dict[str, Any]] = {
    "by bytes alone": dict(cache_budget_mb=0.75, cache_auto_benchmark=False),
    "measured": dict(
        cache_quality_max_mean_kl=0.1, cache_quality_prompt_len=8, cache_quality_decode_steps=2,
        cache_auto_candidates=("fp16", "q8", "q4:sink_len=4"), cache_auto_bench_steps=1,
        cache_auto_bench_prompt_len=8,
    ),
}  # fmt: skip
#: Caches of one layer, by the words for their storage; three words are for decoupled attention.
SIDES = "residual_len=4,tail_slack=2,sink_len=2"
STORED = (
    "fp32", "fp16/bf16", "q8:plain/q4:plain", f"q4:plain,rotate,fit=mse,{SIDES}/q4:plain,fit=mse,{SIDES}",
    "nf4:plain,qblock=64/q8:plain,rotate", "q4:plain/q8:plain/nf4:plain,rotate",
)  # fmt: skip
#: Tokens of the rows, and tokens fed in.
LENGTHS, FED = (7, 5), 7
#: Storage of a whole model's caches: 4 bits with sinks and a tail shorter than the cached text.
MODEL_CACHE = STORED[3].replace("len=4", "len=8").replace("slack=2", "slack=4")
MANIFEST = """
targets:
  - name: kept
    runs:
      - {id: run, prompts: ["def main():"], generate: {max_new_tokens: 6, temperature: 0.0}, output: run.json}
"""


def ids(count: int = 64) -> Tensor:
    """(count,) ids of held-out text."""
    return torch.tensor(demo_tokenizer().encode(held_out_text()[:4000]).ids[:count])


def texts() -> dict[str, list[int] | str]:
    """Generated texts, greedy and sampled with a seed."""
    model, prompt = load_demo(), ids(24)[None]
    greedy: dict[str, Any] = dict(max_new_tokens=12, temperature=0.0)
    sampled: dict[str, Any] = dict(max_new_tokens=12, temperature=0.8, top_p=0.95, seed=7)

    def new(out: Any) -> list[int]:
        return out[0, prompt.shape[1] :].tolist()

    found: dict[str, Any] = {}
    for kind in ("fp32", "fp16", "q8", "q4", "nf4", "q8/q4:plain"):
        found[f"greedy, {kind}"] = new(Generator(model, cache_kind=kind, **greedy).generate(prompt))
    found["sampled"] = new(Generator(model, cache_kind="q8", **sampled).generate(prompt))
    found["beams"] = new(Generator(model, num_beams=3, max_new_tokens=8).generate(prompt))
    found["penalised"] = new(
        Generator(model, repetition_penalty=1.3, no_repeat_ngram_size=2, **greedy).generate(prompt)
    )
    found["decoupled"] = new(
        Generator(load_demo("dba"), cache_kind="q4/q8/q4", **greedy).generate(prompt)
    )
    for name, how in (("greedy", greedy), ("sampled", sampled)):
        fast = SpeculativeGenerator(model, cache_kind="q8", spec_k=4, **how)
        found[f"speculative, {name}"] = new(fast.generate(prompt))
    engine = Engine(model, cache_kind="q4", num_pages=16)
    prompts = [prompt[0].tolist(), prompt[0, :10].tolist()]
    for name, how in (("greedy", greedy), ("sampled", sampled)):
        for index, output in enumerate(engine.generate_batch(prompts, **how)):
            found[f"engine, {name}, {index}"] = output.generated_tokens
    found["under transformers"] = new(
        accelerate(loaded(demo_path()), "q4").generate(prompt, max_new_tokens=12, do_sample=False)
    )
    text = TextGenerator(checkpoint_path=demo_path(), tokenizer_path=demo_path(), device="cpu")
    found["text"] = text.generate(prompt="def main():", max_new_tokens=12, temperature=0.0)
    return found


def loaded(folder: Path) -> Any:
    """A model of transformers in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def width(spec: str) -> int:
    """Width of a head, in whole blocks."""
    return 64 if "qblock=64" in spec else 32


def layer_cache(spec: str) -> Any:
    kinds = cache_configs(spec)
    sizes: dict[str, Any] = dict(batch_size=len(LENGTHS), max_seq_len=32)
    dim = width(spec)
    if "k_sem_cfg" in kinds:
        return DecoupledLayerKVCache(**sizes, k_sem_dim=dim, k_geo_dim=dim, v_dim=dim, **kinds)
    return LayerKVCache(**sizes, k_dim=dim, v_dim=dim, **kinds)


def queries(spec: str) -> list[Tensor]:
    """Queries: one token of each row, for each key stream."""
    dim, streams = width(spec), len(cache_configs(spec)) - 1
    return [torch.linspace(-1, 1, 2 * 2 * dim).view(2, 2, 1, dim) * (i + 1) for i in range(streams)]


def filled(spec: str) -> dict[str, Any]:
    """The state of a one-layer cache, with its attention output."""
    torch.manual_seed(0)
    cache, dim = layer_cache(spec), width(spec)
    cache.append(*(torch.randn(2, 1, FED, dim) for _ in cache_configs(spec)))
    cache.crop([FED - length for length in LENGTHS])
    return {
        "state": cache.state_dict(),
        "values": cache.get(),
        "attended": cache.attend(*queries(spec)),
    }


def model_cache(model: Any) -> ModelKVCache:
    return ModelKVCache(model.cache_layout, 1, 64, **cache_configs(MODEL_CACHE))


def asked(count: int) -> Tensor:
    """(1, count) ids of the small model."""
    return (torch.arange(count) * 7 % 40 + 3)[None]


@torch.no_grad()
def filled_model() -> dict[str, Any]:
    """The states of the small model's caches after 20 tokens, their values, and the next tokens."""
    model = load_model(HERE / "model")
    cache = model_cache(model)
    model(asked(20), cache)
    states = [layer.state_dict() for layer in cache]
    values = [layer.get() for layer in cache]
    return {"layers": states, "values": values, "logits": model(asked(3), cache)}


@torch.no_grad()
def filled_under_transformers() -> dict[str, Any]:
    """The state of a `CarambaCache` of the same model after a padded and a whole row, and the next logits."""
    model = accelerate(loaded(HERE / "model"), MODEL_CACHE)
    cache = CarambaCache(model, MODEL_CACHE)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, :4] = 0
    model(asked(20).expand(2, -1), attention_mask=mask, past_key_values=cache, use_cache=True)
    state = cache.state_dict()
    return {"state": state, "logits": next_logits(model, cache)}


def next_logits(model: Any, cache: Any) -> Tensor:
    """(2, 3, V) logits of three tokens after such a cache."""
    mask = torch.ones(2, 23, dtype=torch.int64)
    mask[1, :4] = 0
    more = asked(3).expand(2, -1)
    return model(more, attention_mask=mask, past_key_values=cache, use_cache=True).logits


def write_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(
        vocab_size=48, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, initializer_range=0.3, tie_word_embeddings=True,
        max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def planned(name: str, path: Path) -> CachePlan:
    """The plan for some settings, from the file or newly made."""
    settings = CachePolicyFields(cache_plan_path=path, **PLANS[name])
    return choose_cache(load_demo(), settings, **PLANNED)


def moved(plan: CachePlan, **where: Any) -> CachePlan:
    """The plan as if made on another device or by other versions."""
    return plan.model_copy(update={"key": plan.key.model_copy(update=where)})


def measured(folder: Path | None) -> QualityReport:
    """Figures of two caches on a little text; finished parts go to ``folder``."""
    return measure(
        cached_forward(load_demo()), ["q8", "q4"], text_ids=ids(256).numpy(), contexts=(32,), tokens=96,
        needles=0, batch=2, folder=folder,
    )  # fmt: skip


def save(content: Any, path: Path) -> None:
    """``torch.save``, compressed: most of such a small file is zeros."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))


def saved(path: Path) -> Any:
    """Reads a file of `save` with ``torch.load(weights_only=True)``."""
    return torch.load(io.BytesIO(gzip.decompress(path.read_bytes())), weights_only=True)


def write_states(folder: Path) -> None:
    """Writes a small model, and the states of its caches."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    write_model(folder / "model")
    save({spec: filled(spec) for spec in STORED}, folder / "layers.pt.gz")
    save(filled_model(), folder / "model.pt.gz")
    save(filled_under_transformers(), folder / "transformers.pt.gz")


def write_plans(folder: Path) -> None:
    (folder / "plans.json").unlink(missing_ok=True)
    for name in PLANS:
        PlanFile(folder / "plans.json").put(moved(planned(name, folder / "made.json"), **ELSEWHERE))
    for left in ("made.json", "made.json.lock", "plans.json.lock"):
        (folder / left).unlink(missing_ok=True)


def write_reports(folder: Path) -> None:
    """Writes figures of caches with their parts, and the results of a run."""
    shutil.rmtree(folder / "quality", ignore_errors=True)
    report = measured(folder / "quality")
    report.to_json(folder / "quality.json")
    report.to_csv(folder / "quality.csv")
    list(run_manifest(read_manifest(MANIFEST), folder, force=True))
    (folder / "quality/.lock").unlink(missing_ok=True)


def write_json(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


PARTS: dict[str, Callable[[], object]] = {
    "names": lambda: write_json(described.names(), HERE / "names.json"),
    "commands": lambda: write_json(described.commands(), HERE / "commands.json"),
    "texts": lambda: write_json(texts(), HERE / "texts.json"),
    "states": lambda: write_states(HERE),
    "plans": lambda: write_plans(HERE),
    "reports": lambda: write_reports(HERE),
}

if __name__ == "__main__":
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(PARTS):
        sys.exit(f"PYTHONPATH=tests python -m support.before [{'|'.join(PARTS)}]...")
    HERE.mkdir(parents=True, exist_ok=True)
    for part in sys.argv[1:]:
        PARTS[part]()
