"""CompiledStep: the decode step of a model on a CPU, traced once and compiled with torch's Inductor.

An eager decode step of a small model makes some forty calls per layer, whose host overhead exceeds the work they do.
Traced, they are one graph, which Inductor compiles to C++ with fused norms and activations. Every tensor the step
reads is a graph input, so another cache of the same sizes reuses the compiled program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from caramba_fast.cache import ModelKVCache
from caramba_fast.infer.cuda_graph import DecodeGraph, DecodeGraphs, ModelTensors, RecordingError
from caramba_fast.models import LanguageModel
from caramba_fast.models.packed import FOR_INDUCTOR

#: Largest difference between compiled and eager logits, relative to their norm. Inductor rounds less between
#: operations, and each layer amplifies the difference.
ALLOWED = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}

Compiled = dict[Hashable, "Program"]


class Program(NamedTuple):
    """A compiled decode step.

    Attributes:
        run: takes all input tensors, returns logits (B, V).
        inputs: the input tensors; an int is an index into `_own`, for tensors that each cache has its own of.
        shapes: shapes, strides and dtypes of the tensors among ``inputs``.
        tensors: the model's parameters and buffers at compile time.
    """

    run: Callable[..., Any]
    inputs: list[Tensor | int]
    shapes: list[tuple[Any, ...]]
    tensors: ModelTensors

    def holds(self) -> bool:
        """Whether the model still has the tensors the step was compiled with."""
        shapes = [_shape(x) for x in self.inputs if isinstance(x, Tensor)]
        return self.shapes == shapes and self.tensors.unchanged()


class CompiledStep(DecodeGraph):
    """A `DecodeGraph` that compiles the step instead of recording it.

    The first step runs eagerly. The second is compiled, or reuses one of ``programs``, which were compiled for caches
    of the same sizes; its logits are compared with those of the eager step.
    """

    def __init__(self, model: LanguageModel, cache: ModelKVCache, programs: Compiled) -> None:
        super().__init__(model, cache, _Eager())
        self._programs = programs

    def _record(self) -> None:
        own = self._own()
        key = (
            self.cache.reach, torch.get_num_threads(), *map(_shape, own),
            *(x.config for layer in self.cache.layers for x in layer.streams.values()),
        )  # fmt: skip
        before = [layer.lengths.seq_lens.clone() for layer in self.cache.layers]
        try:
            with self.cache.reading_all_slots():
                if key in self._programs and self._programs[key].holds():
                    self._run()
                else:
                    for name in [x for x, one in self._programs.items() if not one.holds()]:
                        del self._programs[name]  # else it keeps the weights that the model had
                    self._programs[key] = self._compiled(own)
            wanted = self._logits
            for layer, lengths in zip(self.cache.layers, before, strict=True):
                layer.lengths.seq_lens.copy_(lengths)  # the program processes the same token again
            program = self._programs[key]
            inputs = [own[x] if isinstance(x, int) else x for x in program.inputs]

            def replay() -> None:
                self._logits = program.run(*inputs)

            replay()
        except (
            Exception
        ) as error:  # of any class: a compiler's, its linker's, torch's; shown with its name
            raise RecordingError(f"{type(error).__name__}: {error}") from error
        assert wanted is not None and self._logits is not None
        _check_equal(wanted, self._logits)
        self._replay = replay

    def _own(self) -> list[Tensor]:
        """The input tensors that each cache has its own of."""
        found = [self._tokens]
        for layer in self.cache.layers:
            found.append(layer.lengths.seq_lens)
            for stream in layer.streams.values():
                parts = (stream.codes, stream.scales, stream.tail, stream.sink)
                found += [x for x in parts if x is not None]
        return found

    def _compiled(self, own: list[Tensor]) -> Program:
        """Traces and compiles the step; tracing runs it and leaves its logits."""

        def step(tokens: Tensor) -> Tensor:
            self._logits = self.model.forward(tokens, self.cache)[:, -1]
            return self._logits

        traced = make_fx(step, FOR_INDUCTOR)(self._tokens)
        tensors = [self._tokens, *_lift(traced)]
        place = {_where(x): index for index, x in enumerate(own)}
        written = _written(traced)
        inputs: list[Tensor | int] = []
        for index, x in enumerate(tensors):
            mine = place.get(_where(x))
            if mine is None and index in written:
                raise RuntimeError(
                    f"the step writes to a tensor {tuple(x.shape)} that is not the cache's"
                )
            inputs.append(x if mine is None else mine)
        if unseen := set(range(len(own))).difference(x for x in inputs if isinstance(x, int)):
            raise RuntimeError(f"the step does not use {len(unseen)} tensors of the cache")
        given: Any = tensors
        with _inductor():
            run = torch._inductor.compile(traced, given)
        shapes = [_shape(x) for x in inputs if isinstance(x, Tensor)]
        return Program(run, inputs, shapes, ModelTensors(self.model))


class _Eager:
    """A `Recorder` that runs steps eagerly."""

    def warm_up(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def why_not_compiled(model: LanguageModel) -> str | None:
    """Why a decode step cannot be compiled; None if it can."""
    if model.device.type != "cpu":
        return f"it is for models on a CPU; this one is on {model.device.type}, see cuda_graph"
    own: str | None = getattr(model, "why_not_recorded", None)
    return own


@contextlib.contextmanager
def _inductor() -> Iterator[None]:
    """Inductor settings for compiling a step; those that this torch version lacks are left out.

    Inputs are always the same tensors, so their sizes are not checked. A C++ wrapper makes the calls between loops
    faster; it is built separately because optimizing it together with the loops takes minutes. Inductor caches
    programs on disk only if there is a ShapeEnv, so it gets one in which all sizes are static. The loops depend on the
    thread count, which not every torch version has in the cache key.
    """
    import torch._inductor.config as settings  # noqa: PLC0415 - takes a second, and only compilation needs it
    from torch._guards import TracingContext, tracing  # noqa: PLC0415 - as above
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: PLC0415 - as above

    wanted = {"size_asserts": False, "cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    options: dict[str, Any] = {name: x for name, x in wanted.items() if hasattr(settings, name)}
    options["cpp.threads"] = torch.get_num_threads()
    fixed = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True))
    with settings.patch(options), tracing(TracingContext(fixed)):
        yield


def _shape(x: Tensor) -> tuple[Any, ...]:
    return (x.shape, None if x.is_mkldnn else x.stride(), x.dtype)


def _where(x: Tensor) -> tuple[Any, ...]:
    return (None if x.is_mkldnn else x.data_ptr(), *_shape(x))


def _lift(traced: fx.GraphModule) -> list[Tensor]:
    """Turns the tensors that a traced graph holds into inputs; returns them in order."""
    graph, found, inputs = traced.graph, list[Tensor](), dict[int, fx.Node]()
    (newest,) = graph.find_nodes(op="placeholder")
    for node in graph.find_nodes(op="get_attr"):
        tensor = getattr(traced, node.target)
        if id(tensor) not in inputs:
            with graph.inserting_after(newest):
                newest = inputs[id(tensor)] = graph.placeholder(f"tensor_{len(found)}")
            found.append(tensor)
        node.replace_all_uses_with(inputs[id(tensor)])
        graph.erase_node(node)
    for name in {**dict(traced.named_parameters()), **dict(traced.named_buffers())}:
        delattr(traced, name)
    for node in graph.nodes:  # Inductor recomputes it
        node.meta.clear()
    traced.recompile()
    return found


def _written(traced: fx.GraphModule) -> set[int]:
    order = {node: index for index, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
    found = set()
    for node in traced.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found.add(order.get(given, -1))
    return found - {-1}


def _check_equal(wanted: Tensor, found: Tensor) -> None:
    """Raises RecordingError if compiled and eager logits differ by more than `ALLOWED`."""
    sound = wanted.isfinite()
    same = bool((sound == found.isfinite()).all())
    a, b = wanted[sound].float(), found[sound].float() if same else None
    off = float((a - b).norm() / a.norm().clamp_min(1e-30)) if b is not None else float("nan")
    if not off <= ALLOWED.get(wanted.dtype, 1e-3):
        raise RecordingError(
            f"compiled, the step gives other logits: they differ by {off:.2g} of their norm"
        )


class CompiledSteps(DecodeGraphs):
    """The `CompiledStep` of a generator's current cache; raises ValueError if the model cannot be compiled."""

    def __init__(self, model: LanguageModel) -> None:
        reason = why_not_compiled(model)
        if reason is not None:
            raise ValueError(f"compile is True and cannot be: {reason}")
        super().__init__(model, None)
        self.reason, self._wanted = None, True
        self._programs: Compiled = {}

    def _new(self, cache: ModelKVCache) -> DecodeGraph:
        return CompiledStep(self._model, cache, self._programs)

    def give_up(self, reason: str) -> None:
        """Raises RecordingError: ``compile=True`` has no fallback."""
        self.forget()
        raise RecordingError(f"compile is True and cannot be: {reason}")

    def state(self, cache: ModelKVCache | None) -> str:
        """The state as text for users."""
        if self._graph is not None and self._graph.cache is cache and self._graph.recorded:
            return "compiled"
        return "will be compiled with the second decode step of a conversation"
