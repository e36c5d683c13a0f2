"""extend_attention: prompts of any length on a cached prefix, in bounded scratch."""

import pytest
import torch
from support import cases, stored
from support.cases import OPTIONS, rows
from support.tolerances import RELATIVE_L2, relative_l2
from torch.utils._python_dispatch import TorchDispatchMode

from caramba_fast.ops import (
    append_,
    decode_attention,
    decoupled_append_,
    decoupled_decode_attention,
    decoupled_extend_attention,
    extend_attention,
    use_backend,
)
from caramba_fast.ops.view import Lanes

DECOUPLED = {"k_sem": 8, "k_geo": 16, "v": 32}
EVERYTHING = [option for option in OPTIONS if option != "window"]
#: Long prompts cannot be in the tail.
LONG = [option for option in EVERYTHING if option != "tail"]


@pytest.fixture(autouse=True)
def _reference():
    with use_backend("reference"):
        yield


def long_case(options=(), tokens=100, lengths=(140, 121), slots=160, **changes):
    """A prompt of ``tokens`` on a prefix of 40 and of 21 tokens."""
    return cases.build(options, tokens=tokens, lengths=lengths, slots=slots, **changes)


@pytest.mark.parametrize("q_chunk", [1, 3, 256])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("options", [(), ("tail", "sinks"), EVERYTHING], ids=len)
def test_it_is_decode_attention_where_both_apply(options, tokens, q_chunk):
    case = cases.build(options, tokens=tokens).append(append_)
    found = case.attend(extend_attention, q_chunk=q_chunk)
    for a, b in zip(found, case.attend(decode_attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)
    cases.check(found, case.expected())


@pytest.mark.parametrize("q_chunk", [2, 256])
def test_decoupled_extend_is_decoupled_decode_where_both_apply(q_chunk):
    case = cases.build(EVERYTHING, dims=DECOUPLED, kinds=("q8_0", "q4_0", "nf4"), tokens=7)
    found = case.append(decoupled_append_).attend(decoupled_extend_attention, q_chunk=q_chunk)
    for a, b in zip(found, case.attend(decoupled_decode_attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("options", [(), ("pages", "leftpad"), LONG], ids=len)
def test_a_prompt_on_a_prefix_is_dense_attention(options):
    case = long_case(options).append(append_)
    if case.query_lens:
        case.query_lens = [100, 37]
    expected = case.expected()
    for q_chunk in (13, 33, 64, 256):
        cases.check(case.attend(extend_attention, q_chunk=q_chunk), expected)


def test_a_prompt_of_three_hundred_tokens_on_a_prefix_is_dense_attention():
    lengths = (350, 301)
    case = long_case(["leftpad", "rotate_k", "query_lens"], 300, lengths, 384, heads=2, kv_heads=1)
    case.append(append_).query_lens = [300, 41]
    expected = case.expected()
    for q_chunk in (100, 256):
        cases.check(case.attend(extend_attention, q_chunk=q_chunk), expected)


def test_a_decoupled_prompt_on_a_prefix_is_dense_attention():
    case = long_case(LONG, dims=DECOUPLED, kinds=("q8_0", "q4_0", "nf4"))
    case.append(decoupled_append_).query_lens = [100, 0]
    expected = case.expected()
    for q_chunk in (33, 256):
        cases.check(case.attend(decoupled_extend_attention, q_chunk=q_chunk), expected)


@pytest.mark.parametrize("query_lens", [[0, 0], [100, 0], [1, 99], [64, 65], [63, 32]])
@pytest.mark.parametrize("q_chunk", [32, 64])
def test_rows_of_a_padded_prompt_end_anywhere_in_a_chunk(query_lens, q_chunk):
    """Equal weights: the answer is the mean of the positions before a query."""
    case = long_case(["query_lens"], kinds=("fp32", "fp32"))
    case.streams["v"].given[:] = torch.arange(140.0)[:, None]
    case.append(append_).query_lens = query_lens
    case.queries["k"].zero_()
    out, lse = case.attend(extend_attention, q_chunk=q_chunk)
    for b, (length, real) in enumerate(zip(case.lengths, query_lens, strict=True)):
        last = torch.arange(length - real, length)
        torch.testing.assert_close(out[b, 0, :real, 0], last / 2)
        torch.testing.assert_close(lse[b, 0, :real], (last + 1).float().log())
        assert (out[b, :, real:] == 0).all() and (lse[b, :, real:] == -torch.inf).all()


@pytest.mark.parametrize("window", [1, 2, 30, 500])
@pytest.mark.parametrize("q_chunk", [7, 256])
def test_a_local_window_counts_the_query_itself(window, q_chunk):
    case = long_case(kinds=("fp32", "fp32"))
    case.streams["v"].given[:] = torch.arange(140.0)[:, None]
    case.append(append_).queries["k"].zero_()
    out, _ = case.attend(extend_attention, local_window=window, q_chunk=q_chunk)
    for b, length in enumerate(case.lengths):
        last = torch.arange(length - 100, length)
        first = (last - window + 1).clamp(min=0)
        torch.testing.assert_close(out[b, 0, :, 0], (first + last) / 2)
    other, _ = case.attend(extend_attention, window_size=(window - 1, 0))
    torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)


def test_a_prompt_in_pieces_equals_the_prompt_at_once():
    """Appending and extending piece by piece: what `prefill="stored"` promises."""
    case = long_case(["rotate_k", "rotate_v"], lengths=(100, 100), slots=128)
    whole = case.append(append_).attend(extend_attention)
    queries = case.queries["k"]
    for start, stop in ((0, 33), (33, 34), (34, 100)):
        case.queries["k"] = queries[:, :, start:stop]
        part = case.attend(extend_attention, cache_seqlens=rows(stop, stop))
        for a, b in zip(whole, part, strict=True):
            assert relative_l2(a[:, :, start:stop], b) <= 1e-6


class Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation created, views aside."""

    def __init__(self):
        super().__init__()
        self.nbytes, self.what = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in torch.utils._pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                size = x.untyped_storage().nbytes()
                if size > self.nbytes:
                    self.nbytes, self.what = size, f"{func} {tuple(x.shape)} {x.dtype}"
        return result


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_a_prompt_chunk_on_a_long_prefix_takes_little_memory(paged, rotate):
    """512 tokens on 8192 of q4: a mask alone would be 4 MB a head, the cache in fp32 16 MB."""
    dim, heads, kv_heads, slots = 64, 8, 4, 8192
    lanes = Lanes.of(kv_heads, dim)
    shape = (slots // 128, 128) if paged else (1, slots)
    table = torch.randperm(slots // 128).to(torch.int32)[None] if paged else None
    k, v = (stored.poisoned(*shape, lanes, dim, "q4_0") for _ in range(2))
    for view in (k, v):
        view.scales.fill_(0.1)
    k, v = (cases.KVView(x.codes, x.scales, x.kind, rotate=rotate) for x in (k, v))
    q = torch.randn(1, heads, 512, dim)
    with Largest() as largest:
        out = extend_attention(q, k, v, rows(8000), n_kv_heads=kv_heads, block_table=table)
    assert out.isfinite().all()
    assert largest.nbytes <= 8 * 2**20, largest.what


def test_a_smaller_q_chunk_takes_less_scratch():
    lanes = Lanes.of(1, 32)
    k, v = (stored.poisoned(1, 4096, lanes, 32, "fp32") for _ in range(2))
    k.codes.normal_(), v.codes.normal_()
    sizes = []
    for q_chunk in (16, 512):
        with Largest() as largest:
            extend_attention(
                torch.randn(1, 1, 512, 32), k, v, rows(4096), n_kv_heads=1, q_chunk=q_chunk
            )
        sizes.append(largest.nbytes)
    assert sizes[0] < sizes[1]


def test_a_prompt_of_half_precision():
    case = long_case(LONG).append(append_)
    case.queries["k"] = case.queries["k"].bfloat16()
    out, _ = case.attend(extend_attention, q_chunk=40)
    assert out.dtype == torch.bfloat16
    assert relative_l2(out, case.expected()[0]) <= RELATIVE_L2[torch.bfloat16]


@pytest.mark.parametrize("options", [(), LONG], ids=len)
def test_opcheck(options):
    case = long_case(options, tokens=40, lengths=(60, 50), slots=64).append(append_)
    for stream in case.streams.values():
        for buffer in (stream.view.sink, stream.view.scales):
            if buffer is not None:
                buffer.nan_to_num_()
    args, keywords = case.flat()
    overload = torch.ops.caramba_fast.extend_attention.default
    torch.library.opcheck(overload, args, {**keywords, "q_chunk": 16})


@pytest.mark.parametrize("streams", [{"k": 32, "v": 32}, DECOUPLED], ids=len)
def test_opcheck_and_one_graph_of_append_with_options(streams):
    case = cases.build(EVERYTHING, dims=streams, kinds=("q4_0",) * len(streams))
    for stream in case.streams.values():
        for buffer in (stream.view.tail, stream.view.sink, stream.view.scales):
            buffer.nan_to_num_()
    args, keywords = case.flat_append()
    decoupled = len(streams) == 3
    overload = torch.ops.caramba_fast.decoupled_append_ if decoupled else None
    overload = (overload or torch.ops.caramba_fast.append_).default
    torch.library.opcheck(overload, args, keywords)
    op = decoupled_append_ if decoupled else append_
    with use_backend("auto"):
        case.append(op)
        expected = [s.view.codes.clone() for s in case.streams.values()]
        for stream in case.streams.values():
            stream.view.codes.zero_()
        torch._dynamo.reset()
        torch.compile(lambda: case.append(op) and None, fullgraph=True, backend="aot_eager")()
    used = case.table[case.table >= 0].long()
    for stream, codes in zip(case.streams.values(), expected, strict=True):
        assert not torch.equal(stream.view.codes, torch.zeros_like(codes))
        for page in used[:1]:
            assert torch.equal(stream.view.codes[page], codes[page])


@pytest.mark.parametrize(("change", "message"), [
    (dict(q_chunk=0), "q_chunk is 0"),
    (dict(q_chunk=-4), "q_chunk is -4"),
    (dict(local_window=0), "local_window is 0; 1 or more is allowed"),
    (dict(local_window=3, window_size=(2, 0)), "were both given"),
    (dict(residual_len=4), "residual_len is 4"),
    (dict(no_such_option=1), "extend_attention has no option no_such_option"),
    (dict(s_aux=torch.zeros(1)), "s_aux is"),
])  # fmt: skip
def test_bad_input_is_named(change, message):
    case = long_case().append(append_)
    with pytest.raises((TypeError, ValueError), match=message):
        case.attend(extend_attention, **change)


def test_a_prompt_longer_than_the_tail_is_refused():
    case = long_case(["tail"]).append(append_)
    with pytest.raises(
        ValueError, match="T=100 query tokens and residual_len=6 need a tail of 105"
    ):
        case.attend(extend_attention)
