"""The table of formats and the names users write."""

import pytest
import torch

from caramba_fast.config import KVCacheKind, KVCacheTensorConfig
from caramba_fast.formats import FORMATS, NF4_LEVELS, check_block, resolve


def test_bits_per_value_are_those_of_the_design():
    bits = {name: 8 * row.bytes_per_vector(128, 32) / 128 for name, row in FORMATS.items()}
    assert bits == {"fp32": 32, "fp16": 16, "bf16": 16, "q8_0": 8.5, "q4_0": 4.5, "nf4": 4.5,
                    "q8_channel": 9, "q4_channel": 5}  # fmt: skip


def test_indices_are_the_rows_of_the_table():
    assert [row.index for row in FORMATS.values()] == list(range(len(FORMATS)))


def test_nf4_levels_are_exact_float32_ascending_and_asymmetric_about_zero():
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
    assert levels.double().tolist() == list(NF4_LEVELS)
    assert levels.diff().min() > 0
    assert (levels[0], levels[7], levels[15]) == (-1, 0, 1)


@pytest.mark.parametrize(
    ("name", "kind"), [("q8", "q8_0"), ("q4", "q4_0"), ("nf4", "nf4"), ("Q8_0", "q8_0")]
)
def test_kinds_are_found_by_name_and_alias(name, kind):
    assert KVCacheKind(name).value == kind


@pytest.mark.parametrize("wrong", ["q5", "", None, 8, "int8"])
def test_an_unknown_kind_is_an_error_that_lists_the_known_ones(wrong):
    with pytest.raises(ValueError, match=r"fp16.*q4_0.*nf4"):
        KVCacheKind(wrong)
    with pytest.raises(ValueError, match=r"fp16.*q4_0.*nf4"):
        resolve(wrong)


def test_config_refuses_unknown_fields_kinds_and_blocks():
    with pytest.raises(ValueError, match="qblock is 48; allowed are 32, 64, 128"):
        KVCacheTensorConfig(kind="q8", qblock=48)
    with pytest.raises(ValueError, match="unknown cache kind 'q3'"):
        KVCacheTensorConfig(kind="q3")
    with pytest.raises(ValueError, match="Extra inputs"):
        KVCacheTensorConfig(kind="q8", block=32)


def test_a_block_that_does_not_divide_names_those_that_do():
    with pytest.raises(ValueError, match="block=64 does not divide 96 values; sizes that do: 32"):
        check_block(96, 64)
    with pytest.raises(ValueError, match="no block size does"):
        check_block(40, 32)
