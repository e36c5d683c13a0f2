"""Sessions on disk: who goes on from a file says what it would have said, and what does not fit is refused by name."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import small_model, text
from support.generators import PAD

from caramba_fast.cache import sealed
from caramba_fast.cache.layer import LayerCache
from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.infer.saved import VERSION, WHAT, read_session
from caramba_fast.infer.saved_part import SessionError
from caramba_fast.models import ModelConfig, Transformer
from caramba_fast.models.config import DecoupledDims
from caramba_fast.models.identity import model_digest

KINDS = (
    "fp32", "fp16", "bf16", "q8", "q4", "nf4", "q8:plain", "q4:plain,rotate,fit=mse", "q8/q4",
    "q4:plain,residual_len=40", "nf4:plain,sink_len=6", "q8:residual_len=70,sink_len=3",
)  # fmt: skip
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 3}
#: A whole group by channel and an open one; a batch of rows of which one has not filled its first.
ONE, THREE = [text(1, 77)], [text(1, 50), text(2, 9), text(3, 33)]


def generator(kind: str = "q4", model: Any = None, **settings: Any) -> Generator:
    given = {"max_new_tokens": 12, "max_seq_len": 300, "ignore_eos": True, **GREEDY, **settings}
    if "draft_model" in settings:
        given = {"spec_k": 3, **given}
        return SpeculativeGenerator(model or small_model(), cache_kind=kind, **given)
    return Generator(model or small_model(), cache_kind=kind, **given)


def decoupled(**changes: Any) -> Transformer:
    dims = DecoupledDims(sem_dim=64, geo_dim=128, v_dim=128, null_kv=True)
    return small_model(model_type="caramba_dba", decoupled=dims, **changes)


def goes_on_alike(first: Generator, path: Path, turns: int = 2, **given: Any) -> None:
    """Saves, goes on from the file in another generator, and compares what both say."""
    first.save(path)
    model = first.model
    if isinstance(first, SpeculativeGenerator):
        given = {"draft_model": first.draft_model, "spec_k": first.config.spec_k, **given}
    kept = ("max_new_tokens", "temperature", "top_p", "ignore_eos")
    settings = {name: getattr(first.config, name) for name in kept}
    second = type(first).load(path, model, **settings, **given)
    assert second.tokens == first.tokens
    for turn in range(turns):
        more = [[5 + turn, 6, 7 + row] for row in range(len(first.tokens))]
        assert second.generate(more).tolist() == first.generate(more).tolist()
    assert second.tokens == first.tokens


# -- the same tokens ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("prompts", [ONE, THREE], ids=["one row", "three rows"])
def test_who_goes_on_from_a_file_says_the_same(
    kind: str, how: dict[str, Any], prompts: list[list[int]], tmp_path: Path
) -> None:
    first = generator(kind, **how)
    first.generate(prompts)
    goes_on_alike(first, tmp_path / "session")


@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("draft", ["lookup", "model"])
@pytest.mark.parametrize("kind", ["fp16", "q8", "q4"])
def test_drafts_go_on_too(kind: str, draft: str, how: dict[str, Any], tmp_path: Path) -> None:
    """What is drafted and accepted are the same, so that every random number is drawn for the same thing."""
    model = None if draft == "lookup" else small_model(num_hidden_layers=1)
    first = generator(kind, draft_model=model, **how)
    first.generate(THREE)
    goes_on_alike(first, tmp_path / "session")


@pytest.mark.parametrize(
    "kinds", [{"cache": "auto", "cache_auto_benchmark": False}, {"spec_draft_cache_kind": "q4"}]
)
def test_a_draft_whose_cache_is_of_another_kind_goes_on(
    kinds: dict[str, Any], tmp_path: Path
) -> None:
    draft = small_model(num_hidden_layers=1)
    settings = {"max_new_tokens": 12, "max_seq_len": 300, "ignore_eos": True, "spec_k": 3, **GREEDY}
    given = {"cache": "q8", **settings, **kinds}
    first = SpeculativeGenerator(small_model(), draft, **given)
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "session")
    with pytest.raises(SessionError, match="draft model: kind of k is 'fp32'"):
        SpeculativeGenerator.load(
            tmp_path / "session", first.model, draft_model=draft, spec_draft_cache_kind="fp32"
        )


def test_who_gives_a_part_of_the_storage_keeps_the_rest(tmp_path: Path) -> None:
    first = generator("q8", cache_residual_len=8)
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "session", cache_residual_len=8)
    with pytest.raises(SessionError, match="residual_len of k is 9, the session has 8"):
        Generator.load(tmp_path / "session", first.model, cache_residual_len=9)


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_tokens_may_go_before_anything_was_drafted(draft: str, tmp_path: Path) -> None:
    model = None if draft == "lookup" else small_model(num_hidden_layers=1)
    first = generator(draft_model=model)
    first.prefill(THREE)
    first.save(tmp_path / "session")
    second = SpeculativeGenerator.load(tmp_path / "session", first.model, draft_model=model)
    for each in (first, second):
        each.rollback([2, 0, 1])
        assert each.tokens == [THREE[0][:-2], THREE[1], THREE[2][:-1]]
    goes_on_alike(first, tmp_path / "session")


def test_a_draft_begins_anew_where_the_file_has_none(tmp_path: Path) -> None:
    draft = small_model(num_hidden_layers=1)
    first, used = (generator(draft_model=draft, **SEEDED) for _ in range(2))
    first.prefill(THREE)
    first.save(tmp_path / "session")
    used.generate(ONE)
    used.resume(tmp_path / "session")
    more = [[5], [6], [7]]
    assert used.generate(more).tolist() == first.generate(more).tolist()


@pytest.mark.parametrize(("before", "after"), [(16, 4), (20, 12), (4, 20), (12, 31), (16, None)])
@pytest.mark.parametrize("draft", ["lookup", "model"])
@pytest.mark.parametrize("kind", ["fp16", "q8", "q4", "nf4:plain,residual_len=40"])
def test_who_goes_on_may_draft_more_or_less(
    kind: str, draft: str, before: int, after: int | None, tmp_path: Path
) -> None:
    """From 12 tokens on the rings of a cache are as long as drafts need; ``after`` None drafts nothing."""
    model = None if draft == "lookup" else small_model(num_hidden_layers=1)
    first, plain = generator(kind, draft_model=model, spec_k=before), generator(kind)
    kept: dict[str, Any] = {
        name: getattr(first.config, name)
        for name in ("max_new_tokens", "temperature", "ignore_eos")
    }
    for each in (first, plain):
        each.generate(THREE)
        each.rollback([0, 3, 7])
    first.save(tmp_path / "session")
    second: Generator
    if after is None:
        second = Generator.load(tmp_path / "session", first.model, **kept)
    else:
        given = {**kept, "draft_model": model, "spec_k": after}
        second = SpeculativeGenerator.load(tmp_path / "session", first.model, **given)
    for turn in range(3):
        more = [[5 + turn, 6, 7 + row] for row in range(3)]
        expected = plain.generate(more).tolist()
        assert second.generate(more).tolist() == first.generate(more).tolist() == expected
        for each in (first, second, plain):
            each.rollback(5)


@pytest.mark.parametrize("kind", ["fp32", "q8", "q4/q8/q4", "q4:sink_len=6"])
def test_decoupled_models(kind: str, tmp_path: Path) -> None:
    first = generator(kind, decoupled())
    first.generate(THREE)
    goes_on_alike(first, tmp_path / "session")


@pytest.mark.parametrize("kind", ["fp16", "q8", "q4"])
def test_windows_of_the_model_and_of_a_decode_plan(kind: str, tmp_path: Path) -> None:
    first = generator(kind, small_model(sliding_window=20))
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "model")
    plan = {"decode_plan": "fixed", "decode_local_window": 24}
    first = generator(kind, **plan)
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "plan")
    wide = generator(kind)
    with pytest.raises(SessionError, match="decode_local_window is None, the session has 24"):
        wide.resume(tmp_path / "plan")


def test_sessions_of_plain_nibbles_go_on_with_divided_bytes(tmp_path: Path) -> None:
    """How scales were found is no matter of reading: sessions of before bytes were divided open."""
    first = generator("q4:fit=amax/q4")
    first.generate(ONE)
    first.save(tmp_path / "session")
    second = generator("q4")
    second.resume(tmp_path / "session")
    assert second.tokens == first.tokens
    assert len(second.generate([[5, 6, 7]])[0]) == 3 + 12


@pytest.mark.parametrize("kind", ["fp16", "q8", "q4"])
def test_after_whatever_a_conversation_went_through(kind: str, tmp_path: Path) -> None:
    """Turns taken back across groups, answers that ended early, several answers, beams, other room."""
    first = generator(kind)
    first.generate(THREE)
    first.rollback([20, 3, 17])
    goes_on_alike(first, tmp_path / "rollback")
    first = generator(kind, temperature=0.8, seed=1, num_return_sequences=2)
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "answers", num_return_sequences=2)
    first = generator(kind, num_beams=3)
    first.generate(THREE)
    goes_on_alike(first, tmp_path / "beams", num_beams=3)
    first = generator(kind)
    first.prefill(ONE)
    first.decode_step([9])
    goes_on_alike(first, tmp_path / "steps", max_seq_len=150)
    first = generator(kind, ignore_eos=False, pad_token_id=PAD)
    first.generate(THREE)
    goes_on_alike(first, tmp_path / "ended", pad_token_id=PAD)


def test_models_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = dict(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, initializer_range=0.3, sliding_window=24, use_sliding_window=True,
    )  # fmt: skip

    def made(**changes: Any) -> Any:
        torch.manual_seed(0)
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**sizes, **changes}))

    first = generator("q8", made().eval())
    first.generate(THREE)
    goes_on_alike(first, tmp_path / "session")
    Generator.load(tmp_path / "session", made().eval())
    with pytest.raises(SessionError, match=r"configuration are not those of the .HuggingFaceModel"):
        Generator.load(tmp_path / "session", made(sliding_window=16).eval())


def test_a_session_is_kept_in_place_with_notes(tmp_path: Path) -> None:
    notes = {"messages": [{"role": "user", "content": "ä"}], "n": 3}
    first, second = generator(), generator()
    first.generate(ONE)
    first.save(tmp_path / "session", notes=notes)
    second.generate(THREE)
    assert second.resume(tmp_path / "session") == notes
    assert second.generate([[4, 5]]).tolist() == first.generate([[4, 5]]).tolist()
    first.save(tmp_path / "session")
    assert second.resume(tmp_path / "session") == {}
    second.reset()
    assert second.generate(THREE).shape == (3, 62)


def test_another_word_for_the_same_storage_goes_on(tmp_path: Path) -> None:
    first = generator("q8:plain,rotate")
    first.generate(ONE)
    first.save(tmp_path / "session")
    second = generator("q8:plain", cache_rotate=True)
    second.resume(tmp_path / "session")
    assert second.generate([[4]]).tolist() == first.generate([[4]]).tolist()


def test_a_kind_that_was_chosen_is_kept(tmp_path: Path) -> None:
    chosen = {"cache_auto_candidates": ("fp16", "q8"), "cache_auto_benchmark": False}
    first = generator("auto", cache_quality_prompt_len=8, **chosen)
    first.generate(ONE)
    goes_on_alike(first, tmp_path / "session")


def test_a_seed_of_ones_own_begins_other_random_numbers(tmp_path: Path) -> None:
    first = generator(**SEEDED)
    first.generate(ONE)
    first.save(tmp_path / "session")
    settings = {**SEEDED, "max_new_tokens": 12, "ignore_eos": True}

    def said(**seed: Any) -> list[list[int]]:
        given = {n: x for n, x in settings.items() if n != "seed"} | seed
        return Generator.load(tmp_path / "session", small_model(), **given).generate([[5]]).tolist()

    wanted = first.generate([[5]]).tolist()
    assert said() == said(seed=3) == wanted
    assert said(seed=4) == said(seed=4) != wanted


# -- what is in a file -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_the_bytes_in_use(kind: str, tmp_path: Path) -> None:
    found = generator(kind, max_seq_len=2048)
    found.generate([text(1, 500)])
    found.save(tmp_path / "session")
    assert found.cache is not None
    streams = [stream for layer in found.cache for stream in layer.streams.values()]
    rings = sum(x.nbytes for s in streams for x in (s.tail, s.sink) if x is not None)
    used = found.cache.bytes_per_token * len(found.tokens[0]) + rings + 8 * len(found.tokens[0])
    size = (tmp_path / "session").stat().st_size
    assert 0.95 * used < size < 1.05 * used + 6000
    assert kind not in ("fp16", "q8:plain") or size < found.cache.nbytes / 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_nothing_that_stood_in_memory_before(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same session is the same bytes, whatever the buffers held when they were allocated."""
    found = []
    for byte in (0x55, 0xAA):
        cache_init = LayerCache.__init__

        def poisoned(self: Any, *args: Any, byte: int = byte, init: Any = cache_init) -> None:
            init(self, *args)
            for stream in self.streams.values():
                for buffer in stream.buffers:
                    buffer.view(torch.uint8).fill_(byte)

        with monkeypatch.context() as patched:
            patched.setattr(LayerCache, "__init__", poisoned)
            first = generator(kind)
            first.generate(THREE)
            first.rollback([11, 0, 25])
            first.save(tmp_path / "session")
        found.append((tmp_path / "session").read_bytes())
    assert found[0] == found[1]


def test_nothing_is_read_or_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = generator()
    first.generate(THREE)
    first.save(tmp_path / "session")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a load appends nothing, and runs no model")

    monkeypatch.setattr(LayerCache, "append_streams", never)
    monkeypatch.setattr(Transformer, "forward", never)
    assert Generator.load(tmp_path / "session", small_model()).tokens == first.tokens


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    first = generator("q4", **SEEDED)
    first.generate(ONE)
    first.save(tmp_path / "session")
    return tmp_path / "session"


def test_a_bit_that_changed_anywhere_is_noticed(saved: Path, tmp_path: Path) -> None:
    whole, dice = saved.read_bytes(), random.Random(0)
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(header), *(dice.randrange(header, len(whole)) for _ in range(400)), len(whole) - 1]  # fmt: skip
    for place in places:
        changed = bytearray(whole)
        changed[place] ^= 1 << dice.randrange(8)
        with pytest.raises(sealed.SealedFileError):
            sealed._opened(bytes(changed), WHAT, VERSION)
    changed = bytearray(whole)
    changed[-5] ^= 16
    saved.write_bytes(changed)
    with pytest.raises(
        SessionError, match="session is damaged: its bytes do not have the checksum"
    ):
        Generator.load(saved, small_model())


def test_a_file_that_was_cut_short_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for size in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:size])
        with pytest.raises(SessionError, match=r"cut short|is no session|is damaged"):
            Generator.load(saved, small_model())
    saved.write_bytes(whole + b"\0")
    with pytest.raises(SessionError, match="is damaged"):
        Generator.load(saved, small_model())


def test_older_formats_are_read(saved: Path) -> None:
    found = read_session(saved)
    saved.write_bytes(sealed.sealed(WHAT, 1, found.about.model_dump(), found.tensors))
    read = read_session(saved)
    assert read.about == found.about and read.tensors.keys() == found.tensors.keys()
    Generator.load(saved, small_model())


def test_other_files_and_newer_formats_are_refused(saved: Path, tmp_path: Path) -> None:
    found = read_session(saved)
    data = sealed.sealed(WHAT, VERSION + 1, found.about.model_dump(), found.tensors)
    saved.write_bytes(data)
    with pytest.raises(
        SessionError, match=f"format version {VERSION + 1}; this version .* up to {VERSION}"
    ):
        Generator.load(saved, small_model())
    for other in (b"hello", sealed.sealed("page", 1, {}, {"x": torch.ones(3)}), b"{}" * 30):
        saved.write_bytes(other)
        with pytest.raises(SessionError, match=r"is no session|cut short"):
            Generator.load(saved, small_model())
    with pytest.raises(FileNotFoundError):
        Generator.load(tmp_path / "nothing", small_model())


def _nudged(model: Transformer) -> Transformer:
    """One value of one weight, changed by as little as can be."""
    made = copy.deepcopy(model)
    weight = made.model.layers[1].mlp.up_proj.weight.data
    weight[7, 5] = torch.nextafter(weight[7, 5], torch.tensor(9.0))
    return made


def test_another_model_is_refused(saved: Path) -> None:
    model = small_model()
    assert model_digest(copy.deepcopy(model)) == model_digest(model)
    rope = {"rope_theta": 5000.0}
    for other in (
        _nudged(model),
        copy.deepcopy(model).half(),
        small_model(rms_norm_eps=1e-5),
        small_model(rope=ModelConfig.model_fields["rope"].default.model_copy(update=rope)),
        small_model(sliding_window=20),
    ):
        with pytest.raises(SessionError, match="target model's weights or configuration are not"):
            Generator.load(saved, other)
    for other in (
        small_model(num_hidden_layers=3),
        small_model(num_key_value_heads=4),
        decoupled(),
    ):
        with pytest.raises(SessionError, match=r"target model caches \d layers of"):
            Generator.load(saved, other)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cache_kind": "q8"}, "cache is 'q8', the session has 'q4'"),
        ({"cache_kind": "nf4"}, "cache is 'nf4', the session has 'q4'"),
        ({"cache_kind": "q4:plain"}, "cache is 'q4:plain', the session has 'q4'"),
        ({"cache_kind": "q4", "cache_residual_len": 0}, "residual_len of k is 0, the session has 16"),
        ({"cache_kind": "q4", "cache_sink_len": 5}, "sink_len of k is 5, the session has 4"),
        ({"cache_kind": "q4", "cache_qblock": 64}, "qblock of k is 64, the session has 32"),
        ({"cache_kind": "auto"}, "cache is 'auto', and the session is stored as 'q4'"),
        ({"prefill": "stored"}, "prefill is 'stored', the session has 'exact'"),
        ({"max_seq_len": 80}, "max_seq_len is 80, and the session has a row of 89 tokens"),
        ({"decode_plan": "fixed", "decode_local_window": 9}, "decode_local_window is 9, the session has None"),
    ],
)  # fmt: skip
def test_other_settings_are_refused_by_name(saved: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(SessionError, match=said):
        Generator.load(saved, small_model(), **given)
    settings = {name: x for name, x in given.items() if name != "cache_kind"}
    own = generator(given.get("cache_kind", "q4"), **settings)
    with pytest.raises(SessionError, match=said):
        own.resume(saved)


def test_a_draft_of_another_model_is_refused(tmp_path: Path) -> None:
    first = generator(draft_model=small_model(num_hidden_layers=1))
    first.generate(ONE)
    first.save(tmp_path / "session")
    other = generator(draft_model=_nudged(small_model()))
    with pytest.raises(SessionError, match="the draft model caches 2 layers"):
        other.resume(tmp_path / "session")
    plain = generator()
    plain.resume(tmp_path / "session")  # without a draft, the target's tokens are what they are
    assert plain.generate([[4]]).tolist() == first.generate([[4]]).tolist()


def test_what_is_refused_changes_nothing(saved: Path) -> None:
    first, calm = generator("q8"), generator("q8")
    for each in (first, calm):
        each.generate(THREE)
    with pytest.raises(SessionError):
        first.resume(saved)
    assert first.generate([[4], [5], [6]]).tolist() == calm.generate([[4], [5], [6]]).tolist()


def test_contents_that_contradict_each_other_are_refused(saved: Path) -> None:
    """A checksum says that a file is as it was written, not that whoever wrote it meant well."""
    found = read_session(saved)
    about, tensors = found.about.model_dump(), found.tensors
    deeper = {**about["target"], "layers": about["target"]["layers"][:1]}
    longer = copy.deepcopy(about["target"])
    for layer in longer["layers"]:
        layer["lengths"] = [10**9]
    stream = next(n for n in tensors if n.endswith("k.codes"))
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"target": deeper}, {}),
        ({"target": longer}, {}),
        ({"target": {**about["target"], "counts": [-1]}}, {}),
        ({"target": {**about["target"], "counts": [3]}}, {}),
        ({"target": {**about["target"], "layers": [{}, {}]}}, {}),
        ({"target": {**about["target"], "random": "cuda"}}, {}),
        ({"settings": {}}, {}),
        ({"settings": {**about["settings"], "cache": 7}}, {}),
        ({"more": 1}, {}),
        ({}, {"target.tokens": tensors["target.tokens"] + 61}),
        ({}, {"target.tokens": tensors["target.tokens"].float()}),
        ({}, {"target.random": torch.zeros(3, dtype=torch.uint8)}),
        ({}, {stream: tensors[stream][..., :1].contiguous()}),
    ]
    for told, held in changes:
        sealed.write_sealed(saved, WHAT, VERSION, {**about, **told}, {**tensors, **held})
        with pytest.raises(SessionError):
            Generator.load(saved, small_model())
    less = {n: x for n, x in tensors.items() if n != stream}
    sealed.write_sealed(saved, WHAT, VERSION, about, less)
    with pytest.raises(SessionError, match="k is a NoneType; a tensor is needed"):
        Generator.load(saved, small_model())


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    first = generator()
    with pytest.raises(RuntimeError, match="no conversation to save yet"):
        first.save(tmp_path / "session")
    steps = first.generate_iter(ONE)
    next(steps)
    with pytest.raises(RuntimeError, match="a generation is under way"):
        first.save(tmp_path / "session")
    steps.close()
    with pytest.raises(TypeError, match="JSON"):
        first.save(tmp_path / "session", notes={"x": object()})
    (tmp_path / "other").write_text("mine")
    with pytest.raises(FileExistsError, match="is no session of caramba-fast: it is not replaced"):
        first.save(tmp_path / "other")
    with pytest.raises(OSError, match="cannot write"):
        first.save(tmp_path / "no folder" / "session")
    assert [file.name for file in tmp_path.iterdir()] == ["other"]
    first.save(tmp_path / "other", force=True)
    first.save(tmp_path / "other")


def test_a_save_that_fails_leaves_the_session_before(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    whole = saved.read_bytes()
    first = generator()
    first.generate(THREE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        first.save(saved)
    assert saved.read_bytes() == whole and len(list(saved.parent.iterdir())) == 1
