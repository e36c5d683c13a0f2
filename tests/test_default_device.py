"""A default device (``torch.set_default_device("cuda")``) need not be the model's: "meta" shows what relies on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.hf_matrix import tiny

from caramba_fast import Engine
from caramba_fast.hf import CarambaCache, CarambaStaticCache, accelerate, restore
from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.models import load_demo

PROMPTS = [[5, 6, 7] * 20, [8, 9] * 15]
IDS = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(1))
GQA, DBA, LLAMA = load_demo(), load_demo("dba"), tiny("llama")
GIVEN: dict[str, Any] = {"cache": "q4", "max_seq_len": 256, "max_new_tokens": 6, "seed": 1}


def talk() -> Any:
    made = Generator(GQA, **GIVEN, temperature=0.7, top_p=0.9, logit_bias={5: 1.0})
    said = made.generate(PROMPTS).tolist()
    made.rollback([2, 3])
    return said + made.generate([[3], [4, 5]]).tolist() + made.decode_step([4, 5]).tolist()


def drafts() -> Any:
    return SpeculativeGenerator(GQA, **GIVEN, temperature=0.7).generate(PROMPTS).tolist()


def beams() -> Any:
    return Generator(DBA, **GIVEN, temperature=0.0, num_beams=3).generate(PROMPTS[:1]).tolist()


def requests() -> Any:
    engine = Engine(GQA, cache="q4", cache_bytes=2**23)
    for seed in (1, 2, None):
        engine.add_request(PROMPTS[0], max_new_tokens=6, temperature=0.7, seed=seed, logprobs=2)
    outputs = [event.output for event in engine if event.output is not None]
    return len(outputs), all(len(output.answers[0]) == 6 for output in outputs)


def passes(kind: Any) -> Any:
    model = accelerate(LLAMA, "q4")
    cache = kind(model, "q4", max_cache_len=80) if kind is CarambaStaticCache else kind(model, "q4")
    with torch.no_grad():
        for ids in (IDS, IDS[:, :1], IDS[:, :2]):
            logits = model(ids, past_key_values=cache).logits
    restore(model)
    made = Generator(model, **GIVEN, eos_token_id=1, pad_token_id=0)
    return logits.tolist(), made.generate(PROMPTS).tolist()


@pytest.mark.parametrize(
    "run",
    [
        talk, drafts, beams, requests,
        lambda: passes(CarambaCache), lambda: passes(CarambaStaticCache),
    ],
)  # fmt: skip
def test_no_tensor_relies_on_it(run: Callable[[], Any]) -> None:
    wanted = run()
    with torch.device("meta"):
        assert run() == wanted
