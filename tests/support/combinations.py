"""Compatibility of cache kinds and features: each cell of the table is run, or refused with a message.

`COLUMNS` has the check of each feature and `REFUSED` the refused cells; the tests run every cell, and

    PYTHONPATH=tests python -m support.combinations

writes docs/combinations.md from the same two tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from support.engines import alone, small_model, text

from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.models.config import DecoupledDims
from caramba_fast.serve import Engine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
DBA = "decoupled q4/q8/q4"
#: Row name -> cache spec.
KINDS = {
    **{kind: kind for kind in ("fp32", "fp16", "bf16", "q8", "q4", "nf4")},
    "q8, plain": "q8:plain",
    "q4, rotated": "q4:plain,rotate,fit=mse",
    "q8/q4": "q8/q4",
    "tail and sinks": "q8:plain,residual_len=40,sink_len=4",
    DBA: "q4/q8/q4",
    "auto": "auto",
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 6}
GIVEN = tuple(sorted(GREEDY.items()))
PROMPTS = [text(1, 77), text(2, 9), text(3, 40)]


@dataclass(frozen=True)
class Row:
    """One kind of cache.

    Attributes:
        name: its name on the page.
        spec: its `cache_kind`.
    """

    name: str

    @property
    def spec(self) -> str:
        return KINDS[self.name]

    def model(self, **changes: Any) -> Any:
        """A random model that supports this cache."""
        if self.name != DBA:
            return small_model(**changes)
        dims = DecoupledDims(sem_dim=64, geo_dim=128, v_dim=128, null_kv=True)
        return small_model(model_type="caramba_dba", decoupled=dims, **changes)

    def options(self, **more: Any) -> dict[str, Any]:
        """Settings of a generator with this cache."""
        chosen = {
            "cache_auto_candidates": ("fp16", "q8"), "cache_auto_benchmark": False, "cache_quality_prompt_len": 8,
        }  # fmt: skip
        found = {**GREEDY, "cache_kind": self.spec, "max_seq_len": 512, **more}
        return {**found, **chosen} if self.spec == "auto" else found

    def generator(self, **more: Any) -> Generator:
        return Generator(self.model(), **self.options(**more))

    def engine(self, **more: Any) -> Engine:
        return Engine(self.model(), cache_kind=self.spec, max_seq_len=256, page_size=32, **more)

    def alone(self, prompt: list[int]) -> list[int]:
        """The tokens a generator gives for this prompt alone, prefilled as an engine does."""
        return alone(self.spec, tuple(prompt), GIVEN, self.model())


def new_tokens(generator: Generator, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    out: Any = generator.generate(prompts, **options)
    return out[:, max(map(len, prompts)) :].tolist()


# -- the features -------------------------------------------------------------------------------


def speculation(row: Row) -> None:
    """Speculative decoding of a batch, with prompt lookup and with a draft model, gives the same tokens as without."""
    wanted = new_tokens(row.generator(), PROMPTS)
    for draft in (None, row.model(num_hidden_layers=1)):
        fast = SpeculativeGenerator(row.model(), draft, spec_k=3, **row.options())
        assert new_tokens(fast, PROMPTS) == wanted
        assert fast.stats.drafted > 0


def prefix_reuse(row: Row) -> None:
    """Of two requests with a common prefix, the second reuses the first's pages and gets the tokens it gets alone."""
    serving, prompt = row.engine(cache_salt="all"), text(1, 70)
    for asked, found in ((prompt, 0), ([*prompt[:64], *text(2, 9)], 64)):
        serving.add_request(asked, **GREEDY)
        (output,) = [event.output for event in serving if event.output]
        assert output.generated_tokens == row.alone(asked)
        assert output.metrics.prefix_hit_tokens == found


def windows(row: Row) -> None:
    """Tokens beyond a window, the model's (not decoupled) or a decode plan's, change nothing; without one they do."""
    far = [text(4, 30), text(5, 30)]
    plan = {"decode_plan": "fixed", "decode_local_window": 16}
    for changes, options, same in (
        *([] if row.name == DBA else [({"sliding_window": 16}, {}, True)]),
        ({}, {**plan, "prefill": "stored"}, True),
        ({}, {}, False),
    ):
        model = row.model(**changes)
        said = [
            new_tokens(Generator(model, **row.options(**options)), [[*start, *text(6, 150)]])
            for start in far
        ]
        assert (said[0] == said[1]) == same


def hybrids(row: Row) -> None:
    """transformers' generate() with convolution layers: fp32 matches the stock cache, others the torch reference."""
    import pytest
    from support.hf_matrix import NEVER, PAD

    transformers = pytest.importorskip("transformers")
    config_of = getattr(transformers, "Lfm2Config", None)
    if config_of is None or int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("this transformers gives hybrids a cache of their own")
    from caramba_fast.hf import accelerate, restore
    from caramba_fast.ops import use_backend

    torch.manual_seed(3)
    config = config_of(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"], pad_token_id=PAD, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = NEVER
    ids = torch.tensor([text(1, 70), text(2, 70)])

    def said() -> list[list[int]]:
        found = model.generate(ids, max_new_tokens=10, do_sample=False, pad_token_id=PAD)
        return found[:, 70:].tolist()

    stock = said()
    accelerate(model, row.spec)
    try:
        found = said()
        with use_backend("reference"):
            assert said() == found
    finally:
        restore(model)
    assert row.spec != "fp32" or found == stock


def preemption(row: Row) -> None:
    """An engine that runs out of pages, by recompute and by swap: each request gets the tokens it gets alone."""
    for how in ("recompute", "swap"):
        serving = row.engine(num_pages=5, max_batch_size=3, preemption=how)
        prompts = [text(seed, 28) for seed in range(3)]
        outputs = serving.generate_batch(prompts, **GREEDY)
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.generated_tokens == row.alone(prompt)
        assert serving.metrics.preemptions > 0 and serving.problems() == []


def sessions(row: Row) -> None:
    """A batch is saved and resumed in another generator, which gives the same tokens, greedy and sampled by seed."""
    for how in ({}, {"temperature": 0.9, "seed": 3}):
        first = row.generator(**how)
        first.generate(PROMPTS)
        with TemporaryDirectory() as folder:
            first.save(Path(folder) / "session")
            settings = {**GREEDY, "temperature": how.get("temperature", 0.0)}
            second = Generator.load(Path(folder) / "session", row.model(), **settings)
        more = [[5], [6, 7], [8]]
        for _ in range(2):
            assert new_tokens(second, more) == new_tokens(first, more)


def prefix_store(row: Row) -> None:
    """An engine finds a prompt's pages in the folder that an earlier one filled, and gives the tokens it gets alone."""
    prompt = text(1, 70)
    with TemporaryDirectory() as folder:
        for found in (0, 64):
            serving = row.engine(cache_salt="all", prefix_store=folder)
            serving.add_request(prompt, **GREEDY)
            (output,) = [event.output for event in serving if event.output]
            serving.store.close()
            assert output.generated_tokens == row.alone(prompt)
            assert serving.metrics.prefix_store_tokens == found


def beams(row: Row) -> None:
    """Beam scores equal those of the same tokens fed one by one, for three prompts of different lengths."""
    found: Any = row.generator(num_beams=3, prefill="stored").generate(PROMPTS, return_dict=True)
    width = max(map(len, PROMPTS))
    for sequence, score, prompt in zip(
        found.sequences[:, width:].tolist(), found.sequences_scores.tolist(), PROMPTS, strict=True
    ):
        single, total = row.generator(prefill="stored"), 0.0
        logits = single.prefill([prompt])
        for token in sequence:
            total += float(logits[0].double().log_softmax(-1)[token])
            logits = single.decode_step([token])
        assert abs(total / len(sequence) - score) < 1e-3


def batches(row: Row) -> None:
    """Three prompts of different lengths in a batch, and a second turn: each row gets the tokens it gets alone."""
    together, more = row.generator(), [[5, 6], [7], [8, 9, 10]]
    first, second = new_tokens(together, PROMPTS), new_tokens(together, more)
    for index, prompt in enumerate(PROMPTS):
        single = row.generator()
        assert new_tokens(single, [prompt]) == [first[index]]
        assert new_tokens(single, [more[index]]) == [second[index]]


def tensor_parallel(row: Row) -> None:
    """Two ranks with half of the heads each give the tokens of one process; saving their session is refused."""
    import copy

    from support.distributed_models import ids, model
    from support.distributed_tensor_checks import group

    from caramba_fast import distributed

    given = model("dba_wide" if row.name == DBA else "gqa")
    split = Generator(distributed.tensor_parallel(copy.deepcopy(given), group()), **row.options())
    prompts = [ids(1, 70)[0].tolist(), ids(1, 20, 6)[0].tolist()]
    said = [new_tokens(one, prompts) for one in (Generator(given, **row.options()), split)]
    assert said[0] == said[1]
    try:
        split.save("a session")
    except TypeError as error:
        assert "each has a part of its weights or of its cache" in str(error)
    else:
        raise AssertionError("a session of several ranks is refused")


#: Column name -> check.
COLUMNS: dict[str, Callable[[Row], None]] = {
    "speculation": speculation,
    "prefix reuse": prefix_reuse,
    "prefix store": prefix_store,
    "preemption": preemption,
    "sessions": sessions,
    "windows": windows,
    "hybrids": hybrids,
    "beams": beams,
    "batches": batches,
    "tensor parallel": tensor_parallel,
}
_TAIL = r"k_cfg has residual_len=40; pages that sequences share allow 0"
_RANKS = "cache is 'auto'; name a kind: the model runs on several ranks, which may measure and choose differently"
_AUTO = "cache is 'auto'; an engine needs a kind"
#: Refused cells and their messages.
REFUSED: dict[tuple[str, str], str] = {
    **{("tail and sinks", c): _TAIL for c in ("prefix reuse", "prefix store", "preemption")},
    **{("auto", c): _AUTO for c in ("prefix reuse", "prefix store", "preemption")},
    (DBA, "hybrids"): "cache='q4/q8/q4' is for decoupled attention; here a cache has K and V",
    (
        "auto",
        "hybrids",
    ): r"its state is not \(only\) keys and values of tokens \(it is recurrent or hybrid\)",
    ("auto", "tensor parallel"): _RANKS,
}

# -- the page -----------------------------------------------------------------------------------


def page() -> str:
    """docs/combinations.md."""
    said = list(dict.fromkeys(REFUSED.values()))
    lines = [
        "# What goes with what",
        "",
        "Kinds of caches against features. Every cell is run by `tests/test_combinations.py` on small random models; "
        "this page is written from the tables of the tests: `PYTHONPATH=tests python -m support.combinations`.",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        f"|---|{':-:|' * len(COLUMNS)}",
    ]
    for name in KINDS:
        marks = [
            f"no ({said.index(REFUSED[name, column]) + 1})" if (name, column) in REFUSED else "✓"
            for column in COLUMNS
        ]
        lines.append(f"| {name} | {' | '.join(marks)} |")
    lines += ["", "✓ works, which means:", ""]
    for name, check in COLUMNS.items():
        lines.append(f"- **{name}**: {(check.__doc__ or '').strip()}")
    lines += ["", "no: refused when it is asked for, with these words:", ""]
    lines += [f"{index}. `{words}`" for index, words in enumerate(map(_plain, said), 1)]
    specs = ", ".join(f"{name}: `{spec}`" for name, spec in KINDS.items() if name != spec)
    lines += ["", f"Rows that are no kind by themselves are {specs}. The decoupled row is of a model with decoupled "
              "attention, the others of grouped queries."]  # fmt: skip
    return "\n".join(lines) + "\n"


def _plain(pattern: str) -> str:
    return re.sub(r"\\(.)", r"\1", pattern)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
