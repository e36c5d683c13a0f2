"""From a checkpoint folder to text: loading, tokenizers, chats, and the text-in-text-out generator."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from caramba_fast.cli.models import TextWriter as FromWhereItWas
from caramba_fast.hf import HuggingFaceModel
from caramba_fast.infer import GenerateConfig
from caramba_fast.infer import Generator as TokenGenerator
from caramba_fast.infer.tokenizer import TextTokenizer, TextWriter
from caramba_fast.inference import generate as shim
from caramba_fast.inference.generate import Generator
from caramba_fast.inference.sampling import apply_temperature, sample_top_p
from caramba_fast.models import (
    CheckpointError,
    Transformer,
    demo_path,
    load_demo,
    load_tokenizer,
    registry,
)
from caramba_fast.models.registry import load

PROMPT, OTHERS = "import os\n\ndef main():", ["Hello", "How are", "The cat"]
GREEDY = dict(temperature=0.0, max_new_tokens=12, cache_kind="fp32")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family the native model does not have, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=2048, initializer_range=0.3,
        bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo_path() / name, folder / name)
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    shutil.copytree(demo_path(), folder)
    return folder


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# -- loading ---------------------------------------------------------------------------------


def test_native_families_load_natively() -> None:
    assert isinstance(load(demo_path()), Transformer)
    assert isinstance(load(demo_path("dba")), Transformer)
    assert load(demo_path(), dtype=None).lm_head.weight.dtype == torch.float16


def test_other_families_load_through_transformers(gpt2: Path) -> None:
    model = load(gpt2, "cpu", torch.bfloat16)
    assert isinstance(model, HuggingFaceModel)
    assert not model.model.training
    weights = list(model.parameters())
    assert {weight.dtype for weight in weights} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in weights)


def test_what_only_the_native_model_lacks_goes_to_transformers(copy: Path) -> None:
    edit(
        copy / "config.json",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    assert isinstance(load(copy), HuggingFaceModel)


def test_both_ways_write_the_same(copy: Path) -> None:
    texts = []
    for activation in ("silu", "swish"):  # the same function; the second name is transformers' only
        edit(copy / "config.json", hidden_act=activation)
        generator = TokenGenerator.from_checkpoint(copy, **GREEDY)
        texts.append(generator.generate([generator.tokenizer.encode(PROMPT)]).tolist())
        assert isinstance(generator.model, HuggingFaceModel) == (activation == "swish")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["ckpt.pt", "model.bin", "model.pth", "a.ckpt", "missing.pkl"])
def test_pickles_are_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    if name != "missing.pkl":
        torch.save({"model": {}}, tmp_path / name)
    for use in (load, TokenGenerator.from_checkpoint, Generator):
        with pytest.raises(CheckpointError, match=r"pickled.*save_pretrained") as raised:
            use(tmp_path / name)
        assert name in str(raised.value)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_folders_of_pickles_are_refused(tmp_path: Path, gpt2: Path, family: str) -> None:
    folder = gpt2 if family == "gpt2" else demo_path()
    shutil.copyfile(folder / "config.json", tmp_path / "config.json")
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle"):
        load(tmp_path)


def test_missing_paths_are_named(tmp_path: Path, gpt2: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file"):
        load(gpt2 / "model.safetensors")
    shutil.copyfile(gpt2 / "config.json", tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"no .safetensors weights"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": 3}', '{"hidden_size": 3}'])
def test_damaged_configs_are_checkpoint_errors(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json|model_type|loaded"):
        load(copy)


def test_damaged_weights_are_checkpoint_errors(tmp_path: Path, gpt2: Path) -> None:
    shutil.copytree(gpt2, tmp_path / "bad")
    state = load_file(gpt2 / "model.safetensors")
    name = "transformer.h.1.attn.c_attn.weight"
    assert name in state
    rest = {key: value for key, value in state.items() if key != name}
    save_file(rest, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"missing.*{name}"):
        load(tmp_path / "bad")
    (tmp_path / "bad" / "model.safetensors").write_bytes(b"\0" * 40)
    with pytest.raises(CheckpointError, match=r"bad cannot be loaded by transformers"):
        load(tmp_path / "bad")


def test_code_of_a_checkpoint_is_never_run(copy: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it-ran"
    (copy / "modeling_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    names = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit(copy / "config.json", model_type="own", auto_map=names)
    with pytest.raises(CheckpointError, match="cannot be loaded by transformers"):
        load(copy)
    assert not marker.exists()


def test_without_transformers_the_error_says_so(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_LOADERS", "_TOKENIZERS"):
        monkeypatch.setattr(registry, name, [])
    monkeypatch.setattr(registry, "_LAZY", {"a_library_nobody_has": "caramba_fast.hf"})
    with pytest.raises(CheckpointError, match=r"gpt2.*pip install transformers"):
        load(gpt2)
    with pytest.raises(ModuleNotFoundError, match="pip install transformers"):
        registry.load_hub_tokenizer(gpt2)


def test_models_that_cannot_be_served_are_type_errors(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r"(no keys and values|is not .only. keys and values)"):
        load(tmp_path)


# -- the generator ---------------------------------------------------------------------------


def test_from_checkpoint_is_the_model_with_its_tokenizer() -> None:
    generator = TokenGenerator.from_checkpoint(demo_path(), **GREEDY)
    assert isinstance(generator, TokenGenerator)
    assert isinstance(generator.tokenizer, TextTokenizer)
    ids = generator.tokenizer.encode(PROMPT)
    assert generator.generate([ids]).tolist() == TokenGenerator(
        load_demo(), **GREEDY
    ).generate([ids]).tolist()  # fmt: skip


def test_from_checkpoint_through_transformers_writes_the_models_own_tokens(gpt2: Path) -> None:
    generator = TokenGenerator.from_checkpoint(gpt2, **GREEDY, ignore_eos=True)
    ids = torch.tensor([generator.tokenizer.encode(PROMPT)])
    model = AutoModelForCausalLM.from_pretrained(gpt2)
    model.generation_config.eos_token_id = None
    expected = model.generate(
        ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    assert generator.generate(ids).tolist() == expected.tolist()


def test_a_config_and_overrides_reach_the_generator() -> None:
    config = GenerateConfig(max_new_tokens=3, cache_kind="q8")
    generator = TokenGenerator.from_checkpoint(demo_path(), config=config, temperature=0.0)
    assert (generator.config.max_new_tokens, generator.config.temperature) == (3, 0.0)
    with pytest.raises(ValueError, match="no_such_setting"):
        TokenGenerator.from_checkpoint(demo_path(), no_such_setting=1)


@pytest.mark.parametrize("how", ["folder", "file", "fast", "slow", "wrapped"])
def test_tokenizers_may_be_given_in_any_form(gpt2: Path, tmp_path: Path, how: str) -> None:
    given: Any = {
        "folder": str(demo_path()),
        "file": demo_path() / "tokenizer.json",
        "fast": load_tokenizer(demo_path()),
        "slow": AutoTokenizer.from_pretrained(demo_path()),
        "wrapped": TextTokenizer.of(demo_path()),
    }[how]
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(gpt2 / name, tmp_path / name)
    assert TokenGenerator.from_checkpoint(tmp_path).tokenizer is None
    tokenizer = TokenGenerator.from_checkpoint(tmp_path, given).tokenizer
    assert tokenizer.encode(PROMPT) == load_tokenizer(demo_path()).encode(PROMPT).ids
    assert tokenizer.decode(torch.tensor(tokenizer.encode(PROMPT))) == PROMPT


def test_wrong_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TokenGenerator.from_checkpoint(demo_path(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        TokenGenerator.from_checkpoint(demo_path(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config.json is no folder"):
        TokenGenerator.from_checkpoint(demo_path(), demo_path() / "config.json")
    with pytest.raises(TypeError, match="tokenizer is a int"):
        TokenGenerator.from_checkpoint(demo_path(), 3)


def test_stop_strings_work_with_it() -> None:
    generator = TokenGenerator.from_checkpoint(
        demo_path(), **{**GREEDY, "max_new_tokens": 40}, stop=["\n"]
    )
    ids = generator.tokenizer.encode("import sys")
    text = generator.tokenizer.decode(generator.generate([ids])[0, len(ids) :])
    assert text.count("\n") == 1


# -- text ------------------------------------------------------------------------------------


@pytest.fixture(params=["tokenizers", "transformers"])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    if request.param == "tokenizers":
        return TextTokenizer.of(demo_path())
    return TextTokenizer(AutoTokenizer.from_pretrained(demo_path()))


@pytest.mark.parametrize("text", ["def f(x):\n    return x", "é🦜 ~ü", " leading", "🐢"])
def test_streams_are_the_text_and_never_half_a_character(
    tokenizer: TextTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    pieces = list(tokenizer.stream(iter(ids)))
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert all(pieces) and not any("\ufffd" in piece for piece in pieces)


def test_streams_are_lazy(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("one two three")
    taken = []

    def tokens() -> Iterator[int]:
        for token in ids:
            taken.append(token)
            yield token

    stream = tokenizer.stream(tokens())
    assert next(stream)
    assert len(taken) < len(ids)


def test_special_tokens_are_not_text(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode([0, *tokenizer.encode("x"), 1]) == "x"
    assert tokenizer.decode([1], skip_special_tokens=False) == "<|endoftext|>"


def test_the_writer_is_where_it_was() -> None:
    assert FromWhereItWas is TextWriter


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("form", ["folder", "object"])
def test_chats_follow_the_folders_template(copy: Path, where: str, form: str) -> None:
    if where.endswith("json"):
        edit(copy / where, chat_template=TEMPLATE)
    else:
        (copy / where).write_text(TEMPLATE)
    given = copy if form == "folder" else AutoTokenizer.from_pretrained(copy)
    tokenizer = TextTokenizer.of(given)
    assert tokenizer.has_chat_template
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(messages)) == "<|user|>hi\n<|assistant|>"
    ids = tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids) == "<|user|>hi\n"


def test_no_template_is_an_error_that_says_so(tokenizer: TextTokenizer) -> None:
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat([{"role": "user", "content": "hi"}])


def test_templates_without_transformers_are_an_error_that_says_so(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(registry, "_TOKENIZERS", [])
    monkeypatch.setattr(registry, "_LAZY", {})
    with pytest.raises(ModuleNotFoundError, match=r"chat template.*transformers and jinja2"):
        TextTokenizer.of(copy).chat([{"role": "user", "content": "hi"}])


# -- text in, text out -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["native", "gpt2"])
def writer(request: pytest.FixtureRequest) -> Generator:
    folder = demo_path() if request.param == "native" else request.getfixturevalue("gpt2")
    return Generator(checkpoint_path=folder, tokenizer_path=demo_path(), device="cpu", seed=0)


def test_basic_generation(writer: Generator) -> None:
    output = writer.generate(
        prompt="Once upon a time", max_new_tokens=20, temperature=0.8, top_p=0.95
    )
    assert output.startswith("Once upon a time")
    assert output == writer.generate("Once upon a time", 20, 0.8, 0.95), "the seed was given"
    assert output == writer.generate_text("Once upon a time", 20, temperature=0.8, top_p=0.95)
    assert output != writer.generate("Once upon a time", 20, 0.8, 0.95, seed=1)


def test_no_temperature_is_greedy(writer: Generator) -> None:
    ids = writer.tokenizer.encode(PROMPT)
    out = TokenGenerator(writer.model, **{**GREEDY, "cache_kind": "fp16"}).generate([ids])
    text = writer.generate(PROMPT, max_new_tokens=12, temperature=0.0, top_p=None)
    assert text == writer.tokenizer.decode(out[0])


def test_streaming(writer: Generator) -> None:
    pieces = list(writer.generate_stream(PROMPT, 15, temperature=0.5))
    assert len(pieces) > 1
    assert PROMPT + "".join(pieces) == writer.generate(PROMPT, 15, temperature=0.5)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 9])
def test_batches(writer: Generator, batch_size: int) -> None:
    settings = dict(max_new_tokens=8, temperature=0.0, cache_kind="fp32")
    outputs = writer.generate_batch(OTHERS, batch_size=batch_size, **settings)
    assert outputs == [writer.generate(prompt, **settings) for prompt in OTHERS]
    assert writer.generate_batch([]) == []


def test_the_end_of_a_row_is_no_text(writer: Generator) -> None:
    settings = dict(max_new_tokens=8, temperature=0.0, cache_kind="fp32")
    free = [writer.tokenizer.encode(text) for text in writer.generate_batch(OTHERS, **settings)]
    eos = free[0][len(writer.tokenizer.encode(OTHERS[0])) + 2]
    short, *_ = writer.generate_batch(OTHERS, **settings, eos_token_id=eos)
    assert short == writer.generate(OTHERS[0], **settings, eos_token_id=eos)
    pieces = writer.generate_stream(OTHERS[0], **settings, eos_token_id=eos)
    assert short == OTHERS[0] + "".join(pieces)
    assert len(short) < len(writer.generate(OTHERS[0], **settings))


def test_padding_behind_a_stop_is_no_text(writer: Generator) -> None:
    """Even where the padding id says something, and no id ends a row."""
    for ending in ({"eos_token_id": 1}, {"ignore_eos": True}):
        settings: dict[str, Any] = dict(max_new_tokens=24, temperature=0.0, stop="\n", **ending)
        alone = [writer.generate(text, **settings) for text in OTHERS]
        assert len({len(text) - len(other) for text, other in zip(alone, OTHERS, strict=True)}) > 1
        assert writer.generate_batch(OTHERS, pad_token_id=77, **settings) == alone


def test_bad_calls_raise(writer: Generator) -> None:
    for call, error, match in (
        (lambda: writer.generate(""), ValueError, "prompt is empty"),
        (lambda: writer.generate_stream(""), ValueError, "prompt is empty"),
        (lambda: writer.generate("x", max_new_tokens=0), ValueError, "max_new_tokens"),
        (lambda: writer.generate("x", temperature=-1), ValueError, "temperature"),
        (lambda: writer.generate("x", top_p=0.0), ValueError, "top_p"),
        (lambda: writer.generate_batch("x"), TypeError, "one string"),
        (lambda: writer.generate_batch(["x"], batch_size=0), ValueError, "batch_size is 0"),
        (lambda: Generator(demo_path(), cache_kind="q3"), ValueError, "cache_kind"),
    ):
        with pytest.raises(error, match=match):
            call()


def test_a_checkpoint_without_tokenizer_needs_one(gpt2: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(gpt2 / name, tmp_path / name)
    with pytest.raises(ValueError, match="has no tokenizer; give tokenizer_path"):
        Generator(tmp_path)


def test_the_command_prints_what_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shim.main(["--seed", "1", "--max-new-tokens", "6"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Loading Tokenizer from {demo_path()}..."
    assert lines[1] == f"Loading Checkpoint from {demo_path()}..."
    assert lines[2:6] == ["Generator Ready.", "", "Prompt: Hello world", "-" * 30]
    assert lines[6].startswith("Hello world")
    assert lines[-1] == "-" * 30


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "caramba_fast.inference.generate", str(tmp_path / "ckpt.pt")],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "pickled" in done.stderr
    assert done.stderr.count("\n") == 1


# -- sampling functions ------------------------------------------------------------------------


def test_temperature() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5])
    assert apply_temperature(logits, 0.5).tolist() == [4.0, 3.0, 2.0, 1.0]
    assert torch.equal(apply_temperature(logits, 1.0), logits)
    assert apply_temperature(logits, 0.0).softmax(-1).tolist() == [1.0, 0.0, 0.0, 0.0]
    for wrong in (-0.1, float("nan")):
        with pytest.raises(ValueError, match="temperature"):
            apply_temperature(logits, wrong)


def shares(probs: Tensor, p: float, draws: int = 20000) -> Tensor:
    drawn = sample_top_p(probs.expand(draws, -1), p, torch.Generator().manual_seed(0))
    assert drawn.shape == (draws, 1)
    return drawn[:, 0].bincount(minlength=probs.shape[-1]) / draws


def test_the_nucleus_of_the_page() -> None:
    probs = torch.tensor([0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02])
    kept = torch.tensor([0.40, 0.25, 0.15, 0.10, 0, 0, 0]) / 0.90
    torch.testing.assert_close(shares(probs, 0.9), kept, atol=0.015, rtol=0)
    torch.testing.assert_close(shares(probs, 1.0), probs, atol=0.015, rtol=0)
    assert shares(probs[torch.randperm(7)], 1e-9).max() == 1.0


def test_every_row_is_normalized_by_itself() -> None:
    """One sum over the batch, as the original had it, gives rows of different mass wrong shares."""
    one, other = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.3, 0.3, 0.2, 0.2])
    batch = torch.stack((one, other, one * 7)).repeat(8000, 1)
    before = batch.clone()
    drawn = sample_top_p(batch, 0.7, torch.Generator().manual_seed(0)).view(-1, 3)
    assert torch.equal(batch, before)
    for column, expected in enumerate(
        ([0.5, 0.5, 0, 0], [0.375, 0.375, 0.25, 0], [0.5, 0.5, 0, 0])
    ):
        found = drawn[:, column].bincount(minlength=4) / 8000
        torch.testing.assert_close(found, torch.tensor(expected), atol=0.025, rtol=0)


def test_shapes_and_bounds_of_p() -> None:
    assert sample_top_p(torch.ones(3, 5, 11), 0.5).shape == (3, 5, 1)
    assert sample_top_p(torch.ones(11), 0.5).shape == (1,)
    for wrong in (0.0, -1.0, 1.5):
        with pytest.raises(ValueError, match="p is"):
            sample_top_p(torch.ones(4), wrong)


def test_a_tokenizer_of_the_library_alone_is_enough() -> None:
    tokenizer = TextTokenizer(Tokenizer.from_file(str(demo_path() / "tokenizer.json")))
    assert tokenizer.decode(tokenizer.encode("x = 1")) == "x = 1"


def test_a_tokenizer_that_was_trained_with_limits_reads_texts_whole(tmp_path: Path) -> None:
    from caramba_fast.models import demo_tokenizer

    text = "def read(path):\n    return open(path).read()\n" * 20
    limited, wanted = demo_tokenizer(), demo_tokenizer().encode(text).ids
    limited.enable_truncation(8)
    limited.enable_padding(length=4000)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert TextTokenizer.of(tmp_path).encode(text) == wanted


def test_streams_of_byte_fallback_tokens_are_the_text() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {f"<0x{i:02X}>": i for i in range(256)} | {"▁A": 256, "▁B": 257, "<unk>": 258}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["</s>"])
    tokenizer, end = TextTokenizer(made), made.token_to_id("</s>")
    assert "".join(tokenizer.stream([256, end, 257])) == tokenizer.decode([256, end, 257]) == "A B"
    context, new = list("ကခဂဃ".encode()), [*"င".encode(), 257]
    assert "".join(tokenizer.stream(new, context)) == "င B"
    assert tokenizer.decode(context + new).endswith("င B")
    parts: list[str] = []
    writer = TextWriter(tokenizer.decode, parts.append, context)
    before = writer.state
    writer.put(new[0])
    writer.state = before  # a step of an engine was interrupted
    for token in new:
        writer.put(token)
    assert "".join(parts) == "င B"


def test_what_the_text_generator_cannot_heed_is_refused() -> None:
    from caramba_fast.inference.generate import Generator as TextGenerator
    from caramba_fast.models import demo_path

    with pytest.raises(ValueError, match=r"temperature is given with each call"):
        TextGenerator(demo_path(), temperature=0.0)  # type: ignore[call-arg]
    made = TextGenerator(demo_path(), seed=0)
    assert made.generate("import os", 4, max_length=None)
    wrong: list[tuple[Any, str]] = [
        ({"return_dict": True}, "return_dict is True; a prompt gives one text"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2; a prompt gives one text"),
        ({"max_length": 20}, "max_length is 20; here max_new_tokens"),
    ]
    for given, message in wrong:
        with pytest.raises(ValueError, match=message):
            made.generate("import os", **given)
