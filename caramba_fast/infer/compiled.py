"""CompiledStep: a decode step on a CPU, traced once and compiled by torch's Inductor.

A step of a small model is some forty calls a layer, and each costs the host more than the work it is asked for. Traced,
they are one graph, as CUDA graphs are on a GPU; Inductor makes C++ of it, norms and activations as one loop each. Every
tensor that the step reads goes in as an input, so that another cache of the same sizes takes no second compilation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from caramba_fast.cache import ModelKVCache
from caramba_fast.infer.cuda_graph import DecodeGraph, DecodeGraphs, ModelTensors, RecordingError
from caramba_fast.models import LanguageModel

#: How far logits of a compiled step may be from those of the step as it is, as a share of their norm. Inductor rounds
#: less between operations, and layers make more of it.
ALLOWED = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.3}

Compiled = dict[Hashable, "Program"]


class Program(NamedTuple):
    """What was made of a step.

    Attributes:
        run: takes all tensors of the step, gives the logits (B, V).
        inputs: these tensors; an int for one that the conversation has its own of, by its place in `_own`.
        shapes: of the tensors, with strides and dtypes.
        tensors: of the model then.
    """

    run: Callable[..., Any]
    inputs: list[Tensor | int]
    shapes: list[tuple[Any, ...]]
    tensors: ModelTensors

    def holds(self) -> bool:
        """Whether the model has the tensors it had, and they are as they were."""
        shapes = [_shape(x) for x in self.inputs if isinstance(x, Tensor)]
        return self.shapes == shapes and self.tensors.unchanged()


class CompiledStep(DecodeGraph):
    """The decode step of a model on one cache, compiled.

    The first step runs as it is. With the second it is traced and compiled, or a program of an earlier cache of the
    same sizes is taken, and what it gives is compared with the step as it is.

    Args:
        model, cache: as in `DecodeGraph`.
        programs: those there are, by sizes and limits; new ones are added.
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
                    self._programs[key] = self._compiled(own)
            wanted = self._logits
            for layer, lengths in zip(self.cache.layers, before, strict=True):
                layer.lengths.seq_lens.copy_(lengths)  # the same token again, now by the program
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
        """The tensors that another conversation has others of."""
        found = [self._tokens]
        for layer in self.cache.layers:
            found.append(layer.lengths.seq_lens)
            for stream in layer.streams.values():
                parts = (stream.codes, stream.scales, stream.tail, stream.sink)
                found += [x for x in parts if x is not None]
        return found

    def _compiled(self, own: list[Tensor]) -> Program:
        """Takes the step, which leaves its logits, and makes a program of it."""

        def step(tokens: Tensor) -> Tensor:
            self._logits = self.model.forward(tokens, self.cache)[:, -1]
            return self._logits

        traced = make_fx(step)(self._tokens)
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
    """A recorder that runs steps as they are."""

    def warm_up(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        return step


def why_not_compiled(model: LanguageModel) -> str | None:
    """None where a decode step can be compiled, else the reason it cannot."""
    if model.device.type != "cpu":
        return f"it is for models on a CPU; this one is on {model.device.type}, see cuda_graph"
    own: str | None = getattr(model, "why_not_recorded", None)
    return own


@contextlib.contextmanager
def _inductor() -> Iterator[None]:
    """Settings under which a step is compiled, those of them that this torch has.

    Inputs are always the same tensors, whose sizes need no checks. Calls between loops are C++, too: from Python they
    take longer, and much longer where CPython maps new memory for the frame of each. They are built by themselves, for
    optimizing them with the loops takes minutes.

    Inductor keeps programs on disk for other processes, under a digest of the graph and of these settings. It does so
    for graphs whose sizes it could guard, so it is told that none of them varies. Loops are made for a number of
    threads, which not every torch counts among the settings.
    """
    import torch._inductor.config as settings  # noqa: PLC0415 - takes a second, and only compilation needs it
    from torch._guards import TracingContext, tracing  # noqa: PLC0415 - as above

    wanted = {"size_asserts": False, "cpp_wrapper": True, "cpp_wrapper_build_separate": True}
    options: dict[str, Any] = {name: x for name, x in wanted.items() if hasattr(settings, name)}
    options["cpp.threads"] = torch.get_num_threads()
    fixed = FakeTensorMode(shape_env=ShapeEnv(assume_static_by_default=True))
    with settings.patch(options), tracing(TracingContext(fixed)):
        yield


def _shape(x: Tensor) -> tuple[Any, ...]:
    return (x.shape, x.stride(), x.dtype)


def _where(x: Tensor) -> tuple[Any, ...]:
    return (x.data_ptr(), *_shape(x))


def _lift(traced: fx.GraphModule) -> list[Tensor]:
    """Makes inputs of the tensors that a traced graph holds; returns them in order."""
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
    for node in graph.nodes:  # Inductor finds out by itself
        node.meta.clear()
    traced.recompile()
    return found


def _written(traced: fx.GraphModule) -> set[int]:
    """Which inputs a graph writes to."""
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
    """Raises RecordingError where a program gives other logits than the step it was made of."""
    sound = wanted.isfinite()
    same = bool((sound == found.isfinite()).all())
    a, b = wanted[sound].float(), found[sound].float() if same else None
    off = float((a - b).norm() / a.norm().clamp_min(1e-30)) if b is not None else float("nan")
    if not off <= ALLOWED.get(wanted.dtype, 1e-3):
        raise RecordingError(
            f"compiled, the step gives other logits: they differ by {off:.2g} of their norm"
        )


class CompiledSteps(DecodeGraphs):
    """The `CompiledStep` of whichever cache a generator has at the time.

    Args:
        model: what is compiled.

    Raises:
        ValueError: its steps cannot be compiled.
    """

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
        """Raises RecordingError: compiled steps are always a must."""
        self.forget()
        raise RecordingError(f"compile is True and cannot be: {reason}")

    def state(self, cache: ModelKVCache | None) -> str:
        """In words, for users."""
        if self._graph is not None and self._graph.cache is cache and self._graph.recorded:
            return "compiled"
        return "will be compiled with the second decode step of a conversation"
