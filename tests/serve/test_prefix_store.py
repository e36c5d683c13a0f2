"""Prefixes on disk: found again after a restart by the same tokens of the same scope, and never wrong."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engines import alone, small_model, text
from support.interrupts import count_positions, interrupted_at, places_of

from caramba_fast.cache.sealed import read_sealed, write_sealed
from caramba_fast.models.config import DecoupledDims
from caramba_fast.serve import Engine, EngineConfig, RequestOutput, prefix_store
from caramba_fast.serve.prefix_store import VERSION, WHAT

PAGE = 32
GREEDY = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
GIVEN = tuple(sorted(GREEDY.items()))
KINDS = (
    "fp32", "fp16", "bf16", "q8", "q4", "nf4", "q8:plain", "q4:plain,rotate", "q4:plain,sink_len=5", "q8/q4",
)  # fmt: skip
SETTINGS = {
    "cache_kind": "q4",
    "max_seq_len": 512,
    "page_size": PAGE,
    "num_pages": 40,
    "cache_salt": "all",
}


class Servers:
    """Engines over one folder, one after another."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, []

    def start(self, model: Any = None, **options: Any) -> Engine:
        self.stop()
        given = {**SETTINGS, "prefix_store": self.folder, **options}
        made = Engine(model or small_model(), **given)
        self.running.append(made)
        return made

    def stop(self) -> None:
        while self.running:
            self.running.pop().store.close()

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.page"))


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path / "store")
    yield made
    made.stop()


def answered(serving: Engine, prompt: list[int], **given: Any) -> RequestOutput:
    serving.add_request(prompt, **{**GREEDY, **given})
    (output,) = [event.output for event in serving if event.output]
    assert serving.problems() == [] and output.error is None
    return output


def hits(serving: Engine, prompt: list[int], kind: str = "q4", model: Any = None, **given: Any) -> int:  # fmt: skip
    """Tokens found; the answer is that of a run alone."""
    output = answered(serving, prompt, **given)
    assert output.generated_tokens == alone(kind, tuple(prompt), GIVEN, model)
    return output.metrics.prefix_hit_tokens


# -- found again -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_is_found_again_after_a_restart(kind: str, servers: Servers) -> None:
    prompt = text(1, 3 * PAGE + 9)
    assert hits(servers.start(cache_kind=kind), prompt, kind) == 0
    again = servers.start(cache_kind=kind)
    assert hits(again, prompt[: 2 * PAGE] + text(2, 20), kind) == 2 * PAGE
    assert again.metrics.prefix_store_tokens == 2 * PAGE
    assert hits(again, prompt, kind) == 3 * PAGE, "two pages of memory, and one of the disk"
    assert again.metrics.prefix_store_tokens == 3 * PAGE
    assert hits(again, prompt, kind) == 3 * PAGE
    assert again.metrics.prefix_store_tokens == 3 * PAGE
    whole = servers.start(cache_kind=kind)
    assert hits(whole, prompt[: 3 * PAGE], kind) >= 2 * PAGE, "its last token is read again"


@pytest.mark.parametrize("kind", ["q8", "q4/q8/q4"])
def test_decoupled_models(kind: str, servers: Servers) -> None:
    dims = DecoupledDims(sem_dim=64, geo_dim=128, v_dim=128, null_kv=True)
    model, prompt = small_model(model_type="caramba_dba", decoupled=dims), text(1, 80)
    assert [hits(servers.start(model, cache_kind=kind), prompt, kind, model) for _ in range(2)] == [
        0,
        64,
    ]


def test_answers_are_kept_with_their_prompts(servers: Servers) -> None:
    first = answered(servers.start(), text(1, 20), max_new_tokens=60)
    turn = [*text(1, 20), *first.generated_tokens, 7]
    assert hits(servers.start(), turn) == 2 * PAGE


def test_many_at_once_over_a_small_pool(servers: Servers) -> None:
    """Preemption, pages that memory has lost, several answers: everybody gets what a run alone gives."""
    heads = [text(seed, 4 * PAGE) for seed in range(5)]
    prompts = [[*heads[i % 5][: PAGE * (1 + i % 4)], *text(50 + i, 9)] for i in range(12)]
    for preemption in ("recompute", "swap"):
        for round_ in range(2):
            serving = servers.start(num_pages=12, max_batch_size=4, preemption=preemption)
            names = [serving.add_request(p, **{**GREEDY, "max_new_tokens": 12}) for p in prompts]
            found = {e.request_id: e.output for e in serving if e.output}
            given = tuple(sorted({**GREEDY, "max_new_tokens": 12}.items()))
            for name, prompt in zip(names, prompts, strict=True):
                assert found[name].generated_tokens == alone("q4", tuple(prompt), given)
            assert serving.problems() == []
            assert round_ == 0 or serving.metrics.prefix_store_tokens > 0


# -- who may find it ---------------------------------------------------------------------------


def test_scopes_stay_apart_on_disk(servers: Servers) -> None:
    prompt = text(1, 80)
    first = servers.start(cache_salt=None)
    for given in ({"cache_salt": "a"}, {"cache_salt": "b"}, {}):
        assert hits(first, prompt, **given) == 0
    first.generate_batch([prompt], **GREEDY)
    servers.stop()
    assert len(servers.files) == 4, "two pages each of a and b; others belong to nobody"
    for salt, wanted in (("a", 64), ("b", 64), ("c", 0), (None, 0)):
        given = {} if salt is None else {"cache_salt": salt}
        assert hits(servers.start(cache_salt=None), prompt, **given) == wanted
    again = servers.start(cache_salt=None)
    assert again.generate_batch([prompt], **GREEDY)[0].metrics.prefix_hit_tokens == 0


@pytest.mark.parametrize("what", ["a hash", "all collide"])
def test_tokens_decide_and_not_the_hash(
    what: str, servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "all collide":
        names = prefix_store.PrefixStore._names
        same = [f"{'0' * 16}-{place:040x}.page" for place in range(20)]
        monkeypatch.setattr(
            prefix_store.PrefixStore, "_names", lambda *given: same[: len(names(*given))]
        )
    prompts = [text(seed, 70) for seed in range(3)]
    for prompt in prompts * 2:
        found = hits(servers.start(), prompt)
        assert what == "a hash" or found == 0
    if what == "all collide":
        assert "it is of other tokens" in caplog.text
        assert hits(servers.start(cache_salt="b"), prompts[-1]) == 0
        assert "it is of another scope" in caplog.text


def test_other_models_and_storage_are_never_used(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, other = text(1, 80), small_model(rms_norm_eps=1e-5)
    servers.start()
    hits(servers.running[0], prompt)
    for options in (
        {"model": other},
        {"cache_kind": "nf4"},
        {"cache_sink_len": 5},
        {"cache_qblock": 32, "cache_rotate": False},
        {"page_size": 64},
    ):
        serving = servers.start(**options)
        assert "2 of other models or storage" in serving.store.describe()
        assert answered(serving, prompt).metrics.prefix_hit_tokens == 0
        servers.stop()
        mine = serving.store._mark
        for file in servers.files:
            if file.name.startswith(mine):
                file.unlink()
    # a file that has been given the name of another is looked into
    serving = servers.start(page_size=64)
    scoped = serving.store._names("salt all", small_tokens(prompt), 1)
    foreign = servers.files[0].read_bytes()
    (servers.folder / scoped[0]).write_bytes(foreign)
    serving = servers.start(page_size=64)
    assert answered(serving, prompt).metrics.prefix_hit_tokens == 0
    assert "it is of another model or another storage" in caplog.text
    servers.stop()
    assert (servers.folder / scoped[0]).read_bytes() != foreign, "its place has a page of its own"


def small_tokens(ids: list[int]) -> Any:
    from array import array

    return array("q", ids)


def test_weights_that_change_are_another_model(servers: Servers) -> None:
    import copy

    model, prompt = copy.deepcopy(small_model()), text(1, 80)
    serving = servers.start(model)
    hits(serving, prompt, model=model)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    serving.clear_prefixes()
    changed = answered(serving, prompt)
    assert changed.metrics.prefix_hit_tokens == 0
    again = servers.start(model)
    found = answered(again, prompt)
    assert found.metrics.prefix_hit_tokens == 64 and found.generated_tokens == changed.generated_tokens  # fmt: skip
    assert hits(servers.start(), prompt) == 64


# -- what befalls files ------------------------------------------------------------------------


def _flipped(file: Path, dice: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    file.write_bytes(data)


def _cut(file: Path, dice: random.Random) -> None:
    os.truncate(file, dice.randrange(file.stat().st_size))


@pytest.mark.parametrize("damage", [_flipped, _cut])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_page_is_dropped_and_said(
    damage: Any, place: int, servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, dice = text(1, 3 * PAGE + 5), random.Random(place)
    serving = servers.start()
    hits(serving, prompt)
    names = serving.store._names("salt all", small_tokens(prompt), 3)
    servers.stop()
    damage(servers.folder / names[place], dice)
    serving = servers.start()
    with caplog.at_level(logging.WARNING, "caramba_fast.serve"):
        assert hits(serving, prompt) == place * PAGE
    assert "a page of the prefix store is dropped" in caplog.text and names[place] in caplog.text
    assert hits(servers.start(), prompt) == 3 * PAGE, "it was written again"


def test_every_page_of_a_long_prompt_has_its_own_tokens_alone(servers: Servers) -> None:
    prompt = text(1, 12 * PAGE)
    hits(servers.start(max_seq_len=512), prompt)
    servers.stop()
    sizes = [file.stat().st_size for file in servers.files]
    assert len(sizes) == 12 and len(set(sizes)) == 2, f"the first has the sinks: {sizes}"


def test_pages_of_an_earlier_version_are_not_used_and_all_written_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(1, 3 * PAGE + 5)
    with monkeypatch.context() as earlier:
        earlier.setattr(prefix_store, "VERSION", 2)
        hits(servers.start(), prompt)
        servers.stop()
    assert hits(servers.start(), prompt) == 0
    again = servers.start()
    assert hits(again, prompt) == 3 * PAGE
    assert "and 3 of other models or storage" in again.store.describe()


def test_a_page_with_other_tokens_before_it_is_not_used(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    """As where two prompts differ in their first page, have one second page, and their hashes collide."""
    prompt, other = text(1, 2 * PAGE + 5), text(2, PAGE)
    other += prompt[PAGE:]
    serving = servers.start()
    hits(serving, prompt)
    hits(serving, other)
    names = [serving.store._names("salt all", small_tokens(x), 2)[1] for x in (prompt, other)]
    servers.stop()
    first, second = (servers.folder / name for name in names)
    first.write_bytes(second.read_bytes())
    with caplog.at_level(logging.WARNING, "caramba_fast.serve"):
        assert hits(servers.start(), prompt) == PAGE
    assert "it is of other tokens" in caplog.text


def test_pages_that_somebody_deletes_are_written_again(servers: Servers) -> None:
    prompt = text(1, 2 * PAGE + 5)
    serving = servers.start()
    for turn, wanted in enumerate((0, 0, 2 * PAGE)):  # the second finds that all are gone
        assert hits(serving, prompt) == wanted
        serving.store._writer.submit(int).result()
        assert len(servers.files) == 2
        for file in () if turn else servers.files:
            file.unlink()
        serving.clear_prefixes()  # memory has none
    assert hits(serving, prompt) == 2 * PAGE and serving.store.nbytes == sum(
        file.stat().st_size for file in servers.files
    )


def test_files_that_are_not_ours_are_left_alone(servers: Servers) -> None:
    servers.folder.mkdir()
    (servers.folder / "notes.txt").write_text("mine")
    (servers.folder / "x.page").write_text("mine")
    mark = "0" * 16 + "-" + "0" * 40
    (servers.folder / f".{mark}.page.12-ab.part").write_text("left by a killed writer")
    (servers.folder / f"{mark}.page").write_text("of another model")
    serving = servers.start(prefix_store_bytes=20)
    hits(serving, text(1, 40))
    servers.stop()
    left = {file.name for file in servers.folder.iterdir()} - {".lock"}
    assert left == {"notes.txt", "x.page", f"{mark}.page"}, "no page of ours fits into 20 bytes"
    hits(servers.start(), text(1, 40))
    servers.stop()
    page = max(file.stat().st_size for file in servers.files)
    hits(servers.start(prefix_store_bytes=page), text(2, 40))
    servers.stop()
    left = {file.name for file in servers.folder.iterdir()} - {".lock"}
    assert {"notes.txt", "x.page"} < left, "other files are left alone"
    assert f"{mark}.page" not in left and len(left) == 3, (
        "a page, though another model's: its room was needed"
    )


def test_pages_used_longest_ago_go(servers: Servers) -> None:
    prompts = [text(seed, 2 * PAGE + 5) for seed in range(4)]
    hits(servers.start(), prompts[0])
    servers.stop()
    sizes = [file.stat().st_size for file in servers.files]
    page, most = max(sizes), int(2.25 * sum(sizes))  # two prompts, and less than a page
    for prompt in (prompts[1], prompts[0], prompts[2]):
        hits(servers.start(prefix_store_bytes=most), prompt)
        servers.stop()
        assert sum(file.stat().st_size for file in servers.files) <= most
    for prompt, wanted in ((prompts[0], 64), (prompts[2], 64), (prompts[1], 0)):
        assert hits(servers.start(prefix_store_bytes=most), prompt) == wanted
    small = servers.start(prefix_store_bytes=int(1.5 * page))
    assert len(servers.files) == 1 and small.store.nbytes <= 1.5 * page
    hits(small, text(9, 3 * PAGE + 5))
    assert hits(servers.start(), text(9, 3 * PAGE + 5)) == PAGE, "its beginning is what stayed"


def test_one_process_at_a_time(servers: Servers, tmp_path: Path) -> None:
    serving = servers.start()
    with pytest.raises(ValueError, match="which another process uses; give each a folder"):
        Engine(small_model(), prefix_store=servers.folder, cache_kind="q4")
    serving.store.close()
    servers.running.clear()
    servers.start()
    with pytest.raises(FileNotFoundError):
        Engine(small_model(), prefix_store=tmp_path / "no" / "folder")
    with pytest.raises(ValueError, match="prefix_caching is False"):
        EngineConfig(prefix_store=tmp_path, prefix_caching=False)
    assert oct(servers.folder.stat().st_mode)[-3:] == "700"


def test_an_engine_that_cannot_be_made_leaves_the_folder_to_the_next(servers: Servers) -> None:
    """Whoever tries again may still hold the error, and with it all that had been made."""
    import copy

    unknown = copy.deepcopy(small_model())
    unknown.why_not_saved = "its weights are elsewhere"
    with pytest.raises(TypeError, match="cannot be told from another") as first:
        servers.start(unknown)
    with pytest.raises(ValueError, match="cuda_graph") as second:
        servers.start(cuda_graph=True)
    assert hits(servers.start(), text(1, 40)) == 0 and first.tb and second.tb


def test_a_full_disk_fails_no_request(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert hits(servers.start(), text(1, 80)) == 0
    servers.stop()
    assert "a page is not kept in the prefix store" in caplog.text
    assert "No space left on device" in caplog.text
    assert not servers.files and not list(servers.folder.glob(".*.part"))


@pytest.mark.parametrize("fails", ["identify", "put"])
def test_pages_that_cannot_be_kept_fail_no_request(
    fails: str, servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving, prompt = servers.start(), text(1, 80)

    def broken(*_: Any) -> None:
        raise MemoryError("no room to read to")

    serving.add_request(prompt, **GREEDY)
    serving.step()  # it has looked for its pages
    monkeypatch.setattr(serving.store, fails, broken)
    events = [event for _ in range(4) for event in serving.step()]
    (output,) = [event.output for event in events if event.output]
    assert output.error is None
    assert output.generated_tokens == alone("q4", tuple(prompt), GIVEN)
    assert "no room to read to" in caplog.text
    assert serving.problems() == []


def test_a_page_with_other_tensors_is_dropped(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    prompt = text(1, 40)
    hits(servers.start(), prompt)
    servers.stop()
    (file,) = servers.files
    about, tensors = read_sealed(file, WHAT, VERSION)
    for name in ("page.0", "sinks.1", "page.99"):
        changed = {**tensors, name: tensors["page.0"][..., :1].contiguous()}
        write_sealed(file, WHAT, VERSION, about, changed)
        assert hits(servers.start(), prompt) == 0
        assert "it does not have the tensors of a page" in caplog.text
        caplog.clear()
        servers.stop()


def test_an_interrupt_while_pages_come_back_loses_none(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(1, 3 * PAGE + 9)
    hits(servers.start(), prompt)
    for step in range(1, 8):
        serving = servers.start()
        count, inner = iter(range(1, 99)), type(serving.pool).write

        def interrupted(self: Any, *given: Any, n: Any = count, f: Any = inner, s: int = step) -> None:  # fmt: skip
            if next(n) == s:
                raise KeyboardInterrupt
            f(self, *given)

        with monkeypatch.context() as patched:
            patched.setattr(type(serving.pool), "write", interrupted)
            serving.add_request(prompt, **GREEDY)
            while serving.has_unfinished:
                try:
                    events = serving.step()
                except KeyboardInterrupt:
                    assert serving.problems() == []
        (output,) = [e.output for e in events if e.output]
        assert output.generated_tokens == alone("q4", tuple(prompt), GIVEN)
        assert output.metrics.prefix_hit_tokens == 3 * PAGE and serving.problems() == []


def test_an_interrupt_while_pages_are_put_away_loses_none_for_good(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was interrupted, the next request with these tokens stores them."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    store, tokens = servers.start().store, small_tokens(text(1, 2 * PAGE))
    # A real interrupt never comes right before a lock is let go.
    monkeypatch.setattr(store, "_changing", nullcontext())
    names = store._names("salt all", tokens, 2)

    def put() -> None:
        store.put("salt all", tokens, [0, 1], 0)

    def written() -> None:
        store._writer.submit(int).result()
        for name in names:
            store._drop(name)

    places = places_of(put, prefix_store.__file__)
    written()
    for position in {place: position for position, place in enumerate(places)}.values():
        interrupted_at(position, put, prefix_store.__file__)
        written()
        assert store._writing == set(), position
    put()
    servers.stop()
    assert {file.name for file in servers.files} == set(names)


def test_an_end_that_is_repeated_keeps_no_page_that_others_have_written_to(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends a request, lets another write to its pages, and is interrupted; the next one ends it again."""
    serving, prompt = servers.start(num_pages=6), text(1, 3 * PAGE + 9)
    name = serving.add_request(prompt, **{**GREEDY, "max_new_tokens": 20})
    serving.step()
    serving.add_request(text(2, 4 * PAGE + 9), **GREEDY)
    serving.cancel(name)
    forward = serving.model.forward_ragged

    def interrupted(*args: Any) -> Any:
        forward(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(prefix_store, "WAITING", 0)  # as if the writer were behind
        patched.setattr(serving.model, "forward_ragged", interrupted)
        serving.step()
    list(serving)
    assert serving.problems() == []
    hits(servers.start(), prompt)


def test_of_more_than_may_wait_the_beginning_is_kept(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, prompt = servers.start(), text(1, 5 * PAGE + 9)
    monkeypatch.setattr(prefix_store, "WAITING", 2 * serving.pool.page_bytes)
    store = serving.store
    assert store is not None
    for kept in (2, 4, 5, 5):
        answered(serving, prompt)
        store._writer.submit(int).result()
        assert len(servers.files) == kept
    assert hits(servers.start(), prompt) == 5 * PAGE


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_pages_are_their_owners_alone_in_a_folder_of_others_too(servers: Servers) -> None:
    servers.folder.mkdir(mode=0o755)
    answered(servers.start(), text(1, 2 * PAGE + 9))
    servers.stop()
    assert servers.files and {file.stat().st_mode & 0o777 for file in servers.files} == {0o600}


def test_a_page_that_cannot_be_read_now_is_not_dropped(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(1, 3 * PAGE + 9)
    answered(servers.start(), prompt)
    serving = servers.start()

    def failed(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(prefix_store, "read_sealed", failed)
        assert hits(serving, prompt) == 0
    assert hits(servers.start(), prompt) == 3 * PAGE


def test_an_interrupt_while_weights_are_looked_at_mixes_no_models(servers: Servers) -> None:
    import copy

    model, prompt = copy.deepcopy(small_model()), text(1, 80)
    store = servers.start(model).store
    hits(servers.running[0], prompt, model=model)
    model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5)
    before = store._mark
    count = count_positions(partial(store.identify, 1), prefix_store.__file__)
    epoch, after = 1, store._mark
    assert after != before
    for position in range(count):
        store._mark, epoch = before, epoch + 1
        interrupted_at(position, partial(store.identify, epoch), prefix_store.__file__)
        store.identify(epoch)
        assert store._mark == after, position


def test_a_page_that_memory_has_no_room_for_is_kept_later(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving, prompt = servers.start(), text(1, 3 * PAGE + 5)
    inner, full = prefix_store.sealed, [True]

    def failing(*given: Any) -> bytearray:
        if full and full.pop():
            raise MemoryError("no room to write from")
        return inner(*given)

    monkeypatch.setattr(prefix_store, "sealed", failing)
    hits(serving, prompt)
    serving.store._writer.submit(int).result()
    assert len(servers.files) == 2 and "no room to write from" in caplog.text
    hits(serving, prompt)
    assert hits(servers.start(), prompt) == 3 * PAGE


def test_pages_that_cannot_be_moved_fail_their_request_alone(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = text(1, 80)
    hits(servers.start(), prompt)
    serving = servers.start()

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(serving.pool), "write", broken)
        serving.add_request(prompt, **GREEDY)
        (output,) = [event.output for event in serving if event.output]
        assert "pages could not be moved: RuntimeError: out of memory" in str(output.error)
    assert serving.problems() == [] and hits(serving, prompt) == 64


# -- a process that is killed ------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from support.engines import text
from test_prefix_store import GREEDY, Servers
servers = Servers(Path(sys.argv[1]))
serving = servers.start(prefix_store_bytes=3_000_000)
print("up", flush=True)
number = 0
while True:
    serving.generate_batch([text(number % 50 + i, 150) for i in range(4)], cache_salt="all", **GREEDY)
    number += 1
"""


def test_a_killed_process_leaves_pages_that_are_whole_or_dropped(servers: Servers) -> None:
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests), str(tests / "serve"), str(tests.parent)])
    dice, found = random.Random(1), 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(servers.folder)], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            time.sleep(0.5 + dice.random())
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        serving = servers.start(prefix_store_bytes=3_000_000)
        assert not list(servers.folder.glob(".*.part"))
        for file in servers.files:
            read_sealed(file, WHAT, VERSION)
        for seed in range(0, 12, 3):
            found += hits(serving, text(seed, 150))
        servers.stop()
    assert found > 0
