"""Cache specs: the one word a cache is named by."""

import pytest

from caramba_fast.config import KVCacheKind, KVCacheTensorConfig, cache_configs, kind_names, spec
from caramba_fast.infer import GenerateConfig


def test_one_kind_is_for_all_streams_and_two_are_for_keys_and_values():
    assert {n: c.kind.value for n, c in cache_configs("q4:plain").items()} == {
        "k_cfg": "q4_0",
        "v_cfg": "q4_0",
    }
    both = cache_configs("q8:plain/fp16")
    assert (both["k_cfg"].kind, both["v_cfg"].kind) == (KVCacheKind.Q8_0, KVCacheKind.FP16)
    assert list(cache_configs("q4/q8/q4")) == ["k_sem_cfg", "k_geo_cfg", "v_cfg"]
    assert kind_names("q4:plain,rotate/q8") == ("q4_0", "q8_0")


def test_plain_means_no_defaults():
    for kind in KVCacheKind:
        for config in cache_configs(f"{kind.value}:plain").values():
            assert config == KVCacheTensorConfig(kind=kind)


def test_options_go_on_top_of_the_defaults_and_plain_leaves_those_out():
    assert cache_configs("q4:plain,rotate,fit=mse,qblock=64")["k_cfg"] == KVCacheTensorConfig(
        kind="q4", rotate=True, fit="mse", qblock=64
    )
    assert cache_configs("q4:qblock=64")["k_cfg"] == cache_configs("q4")["k_cfg"].model_copy(
        update={"qblock": 64}
    )
    assert not cache_configs("q4:rotate=false")["k_cfg"].rotate


def test_kinds_mean_keys_by_channel_and_rotated_values():
    configs = cache_configs("q4")
    assert configs["k_cfg"].kind.value == "q4_channel" and configs["k_cfg"].sink_len == 4
    assert configs["v_cfg"].kind.value == "q4_0" and configs["v_cfg"].rotate
    assert cache_configs("nf4")["v_cfg"].kind.value == "nf4"
    assert cache_configs("q8")["k_cfg"].kind.value == "q8_channel"
    assert cache_configs("q4:plain")["k_cfg"] == KVCacheTensorConfig(kind="q4_0")
    assert cache_configs("q4_channel/fp16")["k_cfg"] == KVCacheTensorConfig(kind="q4_channel")


def test_what_a_layer_shares_is_the_same_for_all_its_streams():
    configs = cache_configs("q8:plain/q4:plain,residual_len=24,sink_len=4")
    assert {(c.residual_len, c.sink_len) for c in configs.values()} == {(24, 4)}


def test_fields_say_what_the_spec_does_not():
    config = cache_configs("q4:plain,qblock=64", qblock=32, rotate=True, sink_len=None)["k_cfg"]
    assert (config.qblock, config.rotate, config.sink_len) == (64, True, 0)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("q4", "q4_0"),
        (KVCacheKind.NF4, "nf4"),
        ("q8/q4:rotate,plain", "q8_0/q4_0:plain,rotate"),
        ("q4:fit=mse,rotate=false", "q4_0:fit=mse,rotate=false"),
    ],
)
def test_canonical_names_read_the_same(text, canonical):
    assert spec.spec_name(text) == canonical
    assert spec.spec_name(canonical) == canonical
    assert cache_configs(canonical) == cache_configs(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("q5", "unknown cache kind 'q5'; known kinds are fp32"),
        ("", "unknown cache kind ''"),
        ("q4/q4/q4/q4", "kind\\[:option"),
        ("q4:spin", "has the option 'spin'; kind"),
        ("q4:", "has the option ''"),
        ("q4:qblock", "has the option 'qblock'"),
        ("q4:qblock=-32", "has the option 'qblock=-32'"),
        ("q4:qblock=48", "qblock is 48; allowed are 32, 64, 128"),
        ("q4:fit=best", "'amax' or 'mse'"),
        ("q4:rotate,rotate=false", "gives rotate twice"),
        ("q4/q4:center", "'center' is no setting any more: keys by channel"),
        ("q4:plain,scale", "'scale' is no setting any more"),
        ("q4:residual_len=3/q4:residual_len=4", "residual_len must be the same"),
        (4, "cache spec is 4"),
    ],
)
def test_a_bad_spec_is_named_with_what_is_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        cache_configs(text)


def test_defaults_name_only_settings_there_are():
    for kind, roles in spec.DEFAULTS.items():
        assert set(roles) == {"k", "v"}
        for settings in roles.values():
            KVCacheTensorConfig(**{"kind": kind, **settings})


def test_a_generation_takes_a_spec():
    config = GenerateConfig(cache_kind="q4:plain,rotate/q8:plain", cache_residual_len=16)
    assert config.cache_name == "q4:plain,rotate/q8:plain"
    assert config.stream_configs() == cache_configs("q4:plain,rotate/q8:plain", residual_len=16)
    with pytest.raises(ValueError, match="has the option 'spin'"):
        GenerateConfig(cache_kind="q4:spin")
