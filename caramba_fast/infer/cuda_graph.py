"""DecodeGraph and BatchGraph: a decode step as one CUDA graph, recorded once and replayed while caches grow.

A step of a small model is a few hundred kernel launches, which take the host longer than the kernels run; as a graph
it is one launch. No step depends on a length the host knows: kernels read lengths from the device, get the whole
cache, and split their work by its capacity.
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
    """Records the work of a step."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs ``step`` once, so that everything made at first use exists."""

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records the device work of ``step`` without running it; returns a function that runs it."""


class CudaRecorder:
    """Records on its own stream, as torch requires; its graphs share memory and run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs ``step`` on the recording stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Records one CUDA graph."""
        graph, way = torch.cuda.CUDAGraph(), "thread_local"
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode=way
        ):
            step()
        return graph.replay


class RecordingError(RuntimeError):
    """A step cannot be recorded; the message says why. The cache's lengths may be wrong afterwards."""


class ModelTensors:
    """The parameters and buffers of a model at one time, to detect replaced ones.

    A recorded step sees values that change in place, but not tensors that were replaced (a cast, weights assigned or
    quantized, a replaced module, another active adapter). If ``model`` is neither a module nor holds any as
    attributes, nothing is tracked.
    """

    def __init__(self, model: Any) -> None:
        held = list[tuple[dict[str, Any], str, Any]]()
        modules = [module for top in modules_of(model) for module in top.modules()]
        for module in modules:
            for part in (module._modules, module._parameters, module._buffers):
                if isinstance(part, dict):  # TorchScript's are not
                    held += [(part, name, x) for name, x in part.items()]
        self._parts = [part for part, _, _ in held]
        self._names, self._values = [name for _, name, _ in held], [x for _, _, x in held]
        plain = (x for x in self._values if type(x) in (Tensor, nn.Parameter))
        self._plain = [x for x in plain if x.layout is torch.strided]
        self._places = list(map(Tensor.data_ptr, self._plain))
        self._adapted = [module for module in modules if adapter_state(module) is not None]
        self._adapters = list(map(adapter_state, self._adapted))

    def unchanged(self) -> bool:
        """Whether all tensors are the same and in the same memory, with the same active adapters."""
        get: Any = dict.get
        now = map(get, self._parts, self._names)  # runs in C: it is called at every step
        same = all(map(operator.is_, now, self._values))
        same = same and list(map(Tensor.data_ptr, self._plain)) == self._places
        return same and list(map(adapter_state, self._adapted)) == self._adapters


class DecodeGraph:
    """The decode step of a model on one cache.

    The first step runs eagerly, the second is recorded (by default as a CUDA graph), later ones are replayed.
    Changed attention limits or weights start over.
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
        self._warm: AttentionLimits | None = None  # the limits the step has run with
        self._tensors: ModelTensors | None = None  # of the model when the step was recorded

    @property
    def recorded(self) -> bool:
        """Whether the next step is a replay, unless the attention limits change."""
        return self._replay is not None

    def step(self, tokens: Tensor) -> Tensor:
        """Feeds one token per row, (B, 1) int64, to a cache that is not empty; returns logits (B, V).

        Raises:
            RecordingError: the model cannot be recorded.
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
        """Recording advances the host's lengths but not the device's: the first replay makes up for that."""
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
    """The decode step of an engine for up to ``rows`` sequences, for a model that takes ragged batches.

    The first step runs eagerly, the second is recorded, later ones are replayed.
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
        """Feeds a token to each of N sequences; logits (N, V), which hold until the next step.

        Raises RecordingError if the model cannot be recorded; nothing was stored then.
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
    """The `DecodeGraph` of a generator's current cache.

    ``wanted`` is `GenerateConfig.cuda_graph`; raises ValueError if it is True and there can be no graph.
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
        """Releases a cache that is no longer used."""
        self._graph = None

    def give_up(self, reason: str) -> None:
        """Runs later steps eagerly and warns; raises RecordingError if a graph is required."""
        self.forget()
        self.reason = f"recording failed: {reason}"
        if self._wanted:
            raise RecordingError(self.reason)
        warnings.warn(f"decode steps are not replayed as a CUDA graph: {reason}", stacklevel=2)

    def state(self, cache: ModelKVCache | None) -> str:
        """The state as text for users."""
        if self.reason is not None:
            return f"not used: {self.reason}"
        if self._graph is not None and self._graph.cache is cache and self._graph.recorded:
            return "replayed"
        return "will be recorded with the second decode step of a conversation"


class BatchGraphs(DecodeGraphs):
    """The `BatchGraph` of an engine for each number of rows: 1, 2, 4, … and ``most``; errors as in `DecodeGraphs`.

    Attributes:
        eager: number of steps that could not use a graph, by reason; failed steps count too.
    """

    def __init__(self, model: Any, pool: PagePool, wanted: bool | None, most: int) -> None:
        super().__init__(model, wanted)
        self._pool, self._made = pool, dict[int, BatchGraph]()
        self.sizes = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
        self._shared: Recorder | None = None
        self.eager = Counter[str]()

    def logits(self, tokens: Sequence[int], stretches: Sequence[Stretch]) -> Tensor | None:
        """`BatchGraph.step`; None if the step must run eagerly, and nothing was done."""
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
        """The state of the graphs, for the engine's report."""
        return {"decode_graph": self.state(), "eager_steps": dict(self.eager)}

    def forget(self) -> None:
        """Releases all recorded steps."""
        self._made, self._shared = {}, None

    def state(self, *_: object) -> str:
        """The state as text for users."""
        if self.reason is not None:
            return f"not used: {self.reason}"
        done = [str(rows) for rows, graph in sorted(self._made.items()) if graph.recorded]
        return f"replayed for steps of up to {', '.join(done) or 'no'} sequences"


def why_no_graph(model: LanguageModel) -> str | None:
    """Why a decode step cannot be recorded (a model may say so as ``why_not_recorded``); None if it can."""
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
