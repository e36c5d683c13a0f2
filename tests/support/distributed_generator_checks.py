"""Checks of generation with context parallelism, run on every rank: the tokens equal those of one process."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.distributed_context_checks import group
from support.distributed_models import demo_ids, ids, model

from caramba_fast.cache import LayerShape, ModelKVCache
from caramba_fast.config import cache_configs
from caramba_fast.distributed import ParallelModel, RankGroup, context_parallel
from caramba_fast.infer import Generator, SpeculativeGenerator
from caramba_fast.infer.inferencer import CausalInferencer, GreedySampling, QuantizedKVCache
from caramba_fast.models import load_demo
from caramba_fast.models.context import ContextModel


def generated(given, spec, prompts, **options):
    settings = {"do_sample": False, "max_seq_len": 640, "max_new_tokens": 12, **options}
    generator = Generator(given, cache_kind=spec, **settings)
    return generator, generator.generate(prompts)


def check_the_generator_writes_the_same_tokens():
    demo = load_demo()
    spread = context_parallel(demo, group())
    prompt = demo_ids(500)
    in_chunks = {"prefill": "stored", "prefill_chunk": 200}
    for spec, options in (("fp16", {}), ("q8", {}), ("q4", {}), ("q4", in_chunks)):
        _, expected = generated(demo, spec, [prompt], ignore_eos=True, **options)
        generator, found = generated(spread, spec, [prompt], ignore_eos=True, **options)
        assert found.tolist() == expected.tolist(), (spec, options)
        cache = generator.cache
        rooms = [cache[0].placement.spread.tokens_of(rank) for rank in range(group().size)]
        assert max(rooms) < len(prompt), "longer than the room of any rank"
        whole = ModelKVCache(demo.cache_layout, 1, 640, **cache_configs(spec)).nbytes
        # By channel a rank has a second ring for its own incomplete group.
        rings = [x.tail for layer in cache.layers for x in layer.local.streams.values()]
        second = sum(ring.nbytes for ring in rings if ring is not None)
        assert second <= 0.3 * whole
        assert cache.nbytes - second < 0.8 * whole


def check_sampling_ragged_batches_beams_and_turns():
    demo = load_demo()
    spread = context_parallel(demo, group())
    rows = [demo_ids(300), demo_ids(130, 1000), demo_ids(7, 2000)]
    for options in (
        {"do_sample": True, "temperature": 0.8, "seed": 3},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "seed": 4},
    ):
        runs = [generated(given, "fp32", rows, **options) for given in (demo, spread)]
        assert runs[0][1].tolist() == runs[1][1].tolist(), options
    talks = [generated(given, "q8", rows[1:2])[0] for given in (demo, spread)]
    for talk in talks:
        talk.rollback(9)
    more = [talk.generate([demo_ids(60, 3000)]).tolist() for talk in talks]
    assert more[0] == more[1]
    assert talks[1].decode_graph.startswith("not used")


def check_limits_of_positions_are_those_of_the_model():
    class Limited(ParallelModel):
        max_positions, trained_positions = 100, 20

    given = context_parallel(Limited(model("gqa"), model("gqa").cache_layout, group()), group())
    generator = Generator(given, cache="q8", max_seq_len=300)
    with pytest.raises(ValueError, match="the model with 100 positions"):
        generator.generate(ids(1, 101), max_new_tokens=1)
    with pytest.warns(UserWarning, match="beyond the 20 positions"):
        generator.generate(ids(1, 30), max_new_tokens=1)


def check_a_budget_is_that_of_the_rank_with_most_pages():
    """Of an odd number of pages; a rank that raised alone would leave the others waiting."""
    spread = context_parallel(model("deep"), group())
    cache = ModelKVCache(spread.cache_layout, 1, 384, **cache_configs("q8:plain"))
    most = spread.largest_of_ranks(cache.nbytes)
    settings = {"cache": "q8:plain", "max_seq_len": 384}
    with pytest.raises(ValueError, match=f"takes .* MiB \\({most:,} bytes\\)"):
        Generator(spread, cache_budget_mb=(most - 1) / 2**20, **settings)
    generator = Generator(spread, cache_budget_mb=(2 * most - 1) / 2**20, **settings)
    generator.generate([[1, 2, 3]], max_new_tokens=2)
    with pytest.raises(ValueError, match="a cache of 2 rows takes"):
        generator.generate([[1]], max_new_tokens=2, num_return_sequences=2)
    with pytest.raises(ValueError, match="cache of 2 rows of max_seq_len=384 takes"):
        generator.reset()
        generator.generate([[1, 2, 3], [4]], max_new_tokens=2)


def check_ranks_make_the_same_call():
    generator = Generator(context_parallel(model("gqa"), group()), cache="q8", max_seq_len=300)
    with pytest.raises(ValueError, match="ranks differ in the tokens; all have to make the same"):
        generator.generate(ids(1, 20, seed=group().rank), max_new_tokens=2)
    torch.manual_seed(group().rank)
    with pytest.raises(ValueError, match=r"ranks differ in the random state; .* without a seed"):
        generator.generate(ids(1, 20), max_new_tokens=2, do_sample=True)
    with pytest.raises(ValueError, match=r"ranks differ in the random state"):
        generator.generate(ids(1, 20), max_new_tokens=2)  # samples by default
    for name, value in (("temperature", 0.5 + group().rank), ("max_new_tokens", 2 + group().rank)):
        with pytest.raises(ValueError, match=f"ranks differ in {name}; all have to"):
            generator.generate(ids(1, 20), seed=1, **{"max_new_tokens": 2, name: value})
    generator.generate(ids(1, 20), max_new_tokens=2, do_sample=True, seed=1)
    greedy = {"max_new_tokens": 2, "do_sample": False, "seed": group().rank}
    generator.generate(ids(1, 20), **greedy)


def check_ranks_feed_the_same_tokens():
    """To prefill and decode steps, to an inferencer, and to the model itself."""
    given, mine = context_parallel(model("gqa"), group()), group().rank
    generator = Generator(given, cache="q8", max_seq_len=300)
    generator.prefill(ids(1, 20))
    cache = QuantizedKVCache.of(given, "q8", 1, 300)
    for call in (
        lambda: generator.prefill(ids(1, 20, seed=mine)),
        lambda: generator.decode_step([mine]),
        lambda: CausalInferencer(given).prefill(ids(1, 20, seed=mine), cache, GreedySampling()),
        lambda: given(ids(1, 20 + mine)),
    ):
        with pytest.raises(
            ValueError, match="ranks differ in the tokens; all have to make the same"
        ):
            call()
    assert generator.cache.row_lengths == [20]
    assert cache.model_cache.row_lengths == [0]


def check_a_call_before_the_others_waits_for_them():
    """Rank 0 has left its stream alone, and its next call computes what that of the others does in a step."""
    for call in (
        lambda talk, _: talk.decode_step([3]),
        lambda talk, cache: CausalInferencer(talk.model).prefill(
            ids(1, 1), cache, GreedySampling()
        ),
    ):
        made = dist.new_group(list(range(group().size)))
        own = RankGroup(made, timeout=3, heartbeat=0.2)
        given = context_parallel(model("gqa"), own)
        cache = ModelKVCache(given.cache_layout, 1, 300, **cache_configs("q8"))
        generator = Generator(given, cache="q8", max_seq_len=300, do_sample=False, ignore_eos=True)
        stream = generator.generate_iter(ids(1, 20), max_new_tokens=9)
        next(stream)
        with pytest.raises(RuntimeError, match="not all ranks" if own.rank == 0 else None):
            call(generator, cache) if own.rank == 0 else next(stream)
        own.close()
        dist.barrier()


def check_a_deep_crop_that_one_rank_cannot_finish_fails_on_all():
    """Codes of other ranks refill the ring; memory runs out on rank 0, before and after it has got them."""
    own = RankGroup(dist.new_group(list(range(group().size))), timeout=20)
    given = context_parallel(model("deep"), own)
    for where in ("_own_values", "_put_back"):
        generator = Generator(given, cache="q4", max_seq_len=600, do_sample=False, ignore_eos=True)
        expected = generator.generate(ids(1, 300), max_new_tokens=4).tolist()
        if own.rank == 0:
            setattr(generator.cache[1], where, Mock(side_effect=MemoryError("no more")))
        error, text = (
            (MemoryError, "no more") if own.rank == 0 else (RuntimeError, "rank 0 of .* failed")
        )
        with pytest.raises(error, match=text):
            generator.cache.restore([100])
        assert generator.cache.row_lengths == [0]
        if own.rank == 0:
            delattr(generator.cache[1], where)
        generator.reset()
        assert generator.generate(ids(1, 300), max_new_tokens=4).tolist() == expected
    own.close()


def check_a_call_that_one_rank_left_is_not_mixed_with_its_next():
    """The streamer of rank 0 raises; the other ranks wait for it in a decode step, where its next call would serve."""
    own = RankGroup(dist.new_group(list(range(group().size))), timeout=6)
    generator = Generator(context_parallel(model("deep"), own), cache="q8", max_seq_len=600)
    streamer = Mock(
        put=Mock(side_effect=[None] * 5 + [KeyError("gone") if own.rank == 0 else None] * 20)
    )
    with pytest.raises(KeyError if own.rank == 0 else RuntimeError):
        generator.generate(ids(1, 300), max_new_tokens=12, ignore_eos=True, streamer=streamer)
    if own.rank == 0:
        with pytest.raises(RuntimeError, match="not all ranks have begun this call"):
            generator.generate(ids(1, 250, 7), max_new_tokens=12, ignore_eos=True)
    own.close()


class WithContext(torch.nn.Module):
    """Two layers of attention in the style ``model(tokens, ctx=...)``."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(97, 64), torch.nn.Linear(64, 97)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(64, 192) for _ in range(2))

    def forward(self, tokens, ctx):
        x = self.embed(tokens)
        for index, layer in enumerate(self.qkv):
            q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            x = x + ctx.attend(index, q, k, v).transpose(1, 2).flatten(2)
        return self.head(x)


def check_a_model_with_a_context_writes_the_same_tokens():
    torch.manual_seed(2)
    given = ContextModel(WithContext(), [LayerShape(64, 64, 2)] * 2, 97)
    found = [
        generated(each, "q8", ids(1, 200), ignore_eos=True)[1].tolist()
        for each in (given, context_parallel(given, group()))
    ]
    assert found[0] == found[1]


def check_drafts_in_a_stream_that_is_left_early():
    rows = [ids(1, 40, 8)[0].tolist() * 4, ids(1, 150, 9)[0].tolist()]
    for spec in ("q8", "q4_channel/q4"):
        found = []
        for given in (model("gqa"), context_parallel(model("gqa"), group())):
            generator = SpeculativeGenerator(
                given, cache=spec, max_seq_len=300, ignore_eos=True, do_sample=False
            )
            stream = generator.generate_iter(rows, max_new_tokens=30)
            found.append([next(stream).tolist() for _ in range(17)])
            stream.close()
            found[-1] += generator.generate([[5], [6, 7]], max_new_tokens=9).tolist()
        assert found[0] == found[1], spec


def check_inferencers_write_the_same_tokens():
    found = []
    for given in (model("gqa"), context_parallel(model("gqa"), group())):
        cache, writer = QuantizedKVCache.of(given, "q8", 2, 300), CausalInferencer(given)
        first = writer.prefill(ids(2, 170), cache, GreedySampling())
        found.append((first, writer.decode(first.token_ids, cache, 20, GreedySampling())))
    for expected, written in zip(*found, strict=True):
        assert written.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(written.token_logits, expected.token_logits, atol=1e-3, rtol=0)
    for refused in (cache.get_kv_states, lambda: cache.update([(torch.zeros(2, 2, 1, 16),) * 2])):
        with pytest.raises(TypeError, match="tokens of this cache are spread over ranks"):
            refused()
