"""The digest that tells models apart: plain configurations, and weights that are tensor subclasses."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from caramba_fast.models.demos import load_demo
from caramba_fast.models.identity import model_digest
from caramba_fast.policy.plan import model_identity


@dataclass(slots=True)
class Config:
    rope_theta: float
    made_by: object = field(default_factory=object)


def layers(seed: int, config: Config | None = None) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model.config = config
    return model


def test_a_plain_configuration_is_part_of_it() -> None:
    found = [model_digest(layers(0, Config(theta))) for theta in (1e4, 1e4, 1e6)]
    assert found[0] == found[1] != found[2]


def test_quantized_weights_are_read() -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantized(model: nn.Module) -> nn.Module:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    swapped = layers(0)
    swapped[0], swapped[1] = swapped[1], swapped[0]
    found = [model_digest(quantized(m)) for m in (layers(0), layers(0), layers(1), swapped)]
    assert found[0] == found[1] and len(set(found)) == 3
    assert model_digest(layers(0)) not in found
    models = [load_demo(), load_demo()]
    identity = [model_identity(models[0]), *(model_identity(quantized(m)) for m in models)]
    assert identity[1] == identity[2] != identity[0]
