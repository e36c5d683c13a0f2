"""DecodeGraph and BatchGraph: a decode step as one CUDA graph, recorded once and replayed while caches grow.

A step of a small model is a few hundred launches, whose host time is longer than the kernels'. Recorded, it is
one. That works because nothing of a step depends on a length the host knows: the kernels read lengths from
the device, the cache is named whole, and how work is split follows from its capacity.
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from caramba_fast.cache import AttentionLimits, DecodeBatch, ModelKVCache, PagePool, Stretch
from caramba_fast.models import LanguageModel
from caramba_fast.models.identity import adapter_state, modules_of
from caramba_fast.ops.registry import serving


class Recorder(Protocol):
    """What records the device's work."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs ``step`` once, so that whatever is made at a first use exists."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Notes what ``step`` gives the device to do, without doing it; returns what does it."""


class CudaRecorder:
    """Records on a stream of its own, as torch asks for; its graphs share memory, and run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs ``step`` on the stream that will record."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """One CUDA graph."""
        graph, way = torch.cuda.CUDAGraph(), "thread_local"
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode=way
        ):
            step()
        return graph.replay


class RecordingError(RuntimeError):
    """A step that cannot be recorded, with the reason; the cache may have lengths that do not hold."""


class ModelTensors:
    """The parameters and buffers of a model at one time, to see whether they are still where they were.

    A recorded step reads memory. Values that change in place it sees; tensors that were replaced (a cast, weights
    assigned or quantized, a module put in place of another, another adapter made the active one) it does not.

    Args:
        model: a module, or what holds some as attributes; of another kind nothing is known.
    """

    def __init__(self, model: Any) -> None:
        held = list[tuple[dict[str, Any], str, Any]]()
        modules = [module for top in modules_of(model) for module in top.modules()]
        for module in modules:
            for part in (module._modules, module._parameters, module._buffers):
                if isinstance(part, dict):  # those of TorchScript are none
                    held += [(part, name, x) for name, x in part.items()]
        self._parts = [part for part, _, _ in held]
        self._names, self._values = [name for _, name, _ in held], [x for _, _, x in held]
        plain = (x for x in self._values if type(x) in (Tensor, nn.Parameter))
        self._plain = [x for x in plain if x.layout is torch.strided]
        self._places = list(map(Tensor.data_ptr, self._plain))
        self._adapted = [module for module in modules if adapter_state(module) is not None]
        self._adapters = list(map(adapter_state, self._adapted))

    def unchanged(self) -> bool:
        """Whether all of them are the same tensors in the same memory, and the same adapters are used."""
        get: Any = dict.get
        now = map(get, self._parts, self._names)  # by C alone: it is asked at every step
        same = all(map(operator.is_, now, self._values))
        same = same and list(map(Tensor.data_ptr, self._plain)) == self._places
        return same and list(map(adapter_state, self._adapted)) == self._adapters


class DecodeGraph:
    """The decode step of a model on one cache.

    The first step runs as it is, the second is recorded, later ones are replayed; another reach of the cache, or other
    weights of the model, start this anew.

    Args:
        model, cache: what is run; both keep their tensors.
        recorder: what records; by default CUDA graphs.
    """

    def __init__(
        self, model: LanguageModel, cache: ModelKVCache, recorder: Recorder | None = None
    ) -> None:
        self.model, self.cache = model, cache
        self._recorder = recorder or CudaRecorder(model.device)
        shape = (cache.batch_size, 1)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=model.device)
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._warm: AttentionLimits | None = None  # the reach the step has run with
        self._tensors: ModelTensors | None = None  # of the model when the step was recorded

    @property
    def recorded(self) -> bool:
        """Whether the next step is a replay, if the reach stays."""
        return self._replay is not None

    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token a row, (B, 1) int64, to a cache that is not empty; logits (B, V).

        Raises:
            RecordingError: the model does something a graph cannot hold.
            ValueError, OutOfPagesError: there is no room. Call the cache's `restore` after each.
        """
        self._tokens.copy_(tokens)
        known = self._tensors is None or self._tensors.unchanged()
        if self.cache.reach is not self._warm or not known:
            self._replay, self._warm, self._tensors = None, self.cache.reach, None
            with self.cache.reading_all_slots():
                self._recorder.warm_up(self._run)
        elif self._replay is None:
            self._tensors = ModelTensors(self.model)
            self._record()
        else:
            self.cache.replay(self._replay)
        assert self._logits is not None
        return self._logits.clone()

    def _record(self) -> None:
        """Recording moves the host's lengths and not the device's: the first replay makes that good."""
        try:
            with self.cache.reading_all_slots():
                replay = self._recorder.record(self._run)
        except RuntimeError as error:
            raise RecordingError(str(error)) from error
        replay()
        self._replay = replay

    def _run(self) -> None:
        self._logits = self.model.forward(self._tokens, self.cache)[:, -1]


class BatchGraph:
    """The decode step of an engine for up to so many sequences.

    The first step runs as it is, the second is recorded, later ones are replayed.

    Args:
        model: takes ragged batches.
        rows: of a step, with those that have no sequence.
        pool: where keys and values are.
        recorder: what records.
    """

    def __init__(self, model: Any, rows: int, pool: PagePool, recorder: Recorder) -> None:
        self.model, self.batch, self._recorder = model, DecodeBatch(rows, pool), recorder
        self._rows = torch.arange(rows, device=pool.device)
        self._logits: Tensor | None = None
        self._replay: Callable[[], None] | None = None
        self._tensors: ModelTensors | None = None  # of the model when the step was recorded
        self._is_warm = False

    @property
    def recorded(self) -> bool:
        """Whether the next step is a replay."""
        return self._replay is not None

    def step(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> Tensor:
        """A token of each of some sequences; logits (N, V), which hold until the next step.

        Raises:
            RecordingError: the model does something a graph cannot hold; nothing was stored.
        """
        self.batch.fill(tokens, stretches)
        if self._tensors is not None and not self._tensors.unchanged():
            self._replay, self._is_warm, self._tensors = None, False, None
        if not self._is_warm:
            self._recorder.warm_up(self._run)
            self._is_warm = True
        else:
            if self._replay is None:
                self._tensors = ModelTensors(self.model)
                try:
                    self._replay = self._recorder.record(self._run)
                except RuntimeError as error:
                    raise RecordingError(str(error)) from error
            self._replay()
        assert self._logits is not None
        return self._logits[: len(tokens)]

    def _run(self) -> None:
        ids = self.batch.unpack()
        self._logits = self.model.forward_ragged(ids, self.batch, self._rows)


class DecodeGraphs:
    """The `DecodeGraph` of whichever cache a generator has at the time.

    Args:
        model: what is recorded.
        wanted: `GenerateConfig.cuda_graph`.

    Raises:
        ValueError: a graph was asked for where there cannot be one.
    """

    def __init__(self, model: LanguageModel, wanted: bool | None) -> None:
        self._model, self._wanted = model, wanted
        self._graph: DecodeGraph | None = None
        self.reason = "cuda_graph is False" if wanted is False else why_no_graph(model)
        if wanted and self.reason is not None:
            raise ValueError(f"cuda_graph is True and cannot be: {self.reason}")

    def step(self, cache: ModelKVCache, tokens: Tensor) -> Tensor:
        """`DecodeGraph.step` on ``cache``."""
        if self._graph is None or self._graph.cache is not cache:
            self._graph = self._new(cache)
        return self._graph.step(tokens)

    def _new(self, cache: ModelKVCache) -> DecodeGraph:
        return DecodeGraph(self._model, cache, self._recorder())

    def _recorder(self) -> Recorder:
        return CudaRecorder(self._model.device)

    def forget(self) -> None:
        """Lets go of a cache that is no longer used."""
        self._graph = None

    def give_up(self, reason: str) -> None:
        """Later steps run one by one; warns, or raises RecordingError where a graph is a must."""
        self.forget()
        self.reason = f"recording failed: {reason}"
        if self._wanted:
            raise RecordingError(self.reason)
        warnings.warn(f"decode steps are not replayed as a CUDA graph: {reason}", stacklevel=2)

    def state(self, cache: ModelKVCache | None) -> str:
        """In words, for users."""
        if self.reason is not None:
            return f"not used: {self.reason}"
        if self._graph is not None and self._graph.cache is cache and self._graph.recorded:
            return "replayed"
        return "will be recorded with the second decode step of a conversation"


class BatchGraphs(DecodeGraphs):
    """The `BatchGraph` of an engine for each number of rows: 1, 2, 4, …, and the most it has.

    Args:
        model, pool: as in `BatchGraph`.
        wanted: `GenerateConfig.cuda_graph` of the engine.
        most: sequences of a step.

    Attributes:
        eager: how often a step was to be run one by one, by the reason; also of steps that failed and were undone.

    Raises:
        ValueError: a graph was asked for where there cannot be one.
    """

    def __init__(self, model: Any, pool: PagePool, wanted: bool | None, most: int) -> None:
        super().__init__(model, wanted)
        self._pool, self._made = pool, dict[int, BatchGraph]()
        self.sizes = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        self._shared: Recorder | None = None
        self.eager = Counter[str]()

    def logits(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> Tensor | None:
        """`BatchGraph.step`; None where the step is to be run one by one, and nothing was done."""
        reason = self.reason or self._why_not(stretches)
        if reason is not None:
            self.eager[reason] += 1
            return None
        rows = next(size for size in self.sizes if size >= len(stretches))
        if rows not in self._made:
            self._shared = self._shared or self._recorder()
            self._made[rows] = BatchGraph(self._model, rows, self._pool, self._shared)
        try:
            return self._made[rows].step(tokens, stretches)
        except RecordingError as error:
            self.give_up(str(error))
            self.eager[str(self.reason)] += 1
            return None

    def _why_not(self, stretches: Sequence[Stretch]) -> str | None:
        if len(stretches) > self.sizes[-1]:
            return f"more than {self.sizes[-1]} sequences"
        return DecodeBatch.why_not(stretches, self._pool)

    @property
    def report(self) -> dict[str, Any]:
        """What an engine says of its graphs."""
        return {"decode_graph": self.state(), "eager_steps": dict(self.eager)}

    def forget(self) -> None:
        """Lets go of all recorded steps."""
        self._made, self._shared = {}, None

    def state(self, *_: object) -> str:
        """In words, for users."""
        if self.reason is not None:
            return f"not used: {self.reason}"
        done = [str(rows) for rows, graph in sorted(self._made.items()) if graph.recorded]
        return f"replayed for steps of up to {', '.join(done) or 'no'} sequences"


def why_no_graph(model: LanguageModel) -> str | None:
    """None where a decode step can be recorded, else the reason it cannot.

    A model may say so itself, as ``why_not_recorded``.
    """
    device = model.device
    if device.type != "cuda":
        return f"CUDA graphs need a model on cuda; this one is on {device.type}"
    own: str | None = getattr(model, "why_not_recorded", None)
    if own is not None:
        return own
    runs = serving("decode_attention", "cuda")
    return (
        None if runs == "triton" else f"backend {runs!r} serves attention, which cannot be recorded"
    )
