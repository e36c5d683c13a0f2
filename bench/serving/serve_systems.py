"""The systems that `serve` compares: static batches, our engine, and the continuous batching of transformers.

All have the same bytes for keys and values, and at most `CONCURRENCY` requests at once. A system is made once; every
``run`` starts with an empty cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import torch

from caramba_fast.bench.serving.serve_load import CONCURRENCY, FULL, Clients, Item, Run
from caramba_fast.cache import PagePool
from caramba_fast.infer import GenerateConfig, Generator
from caramba_fast.models import demo_path
from caramba_fast.serve import Engine

PAGE_SIZE = 64
#: Tokens of one forward pass.
BATCH_TOKENS = 512
#: A system counts as stuck after so many seconds without an answer.
STUCK_S = 120.0
STATIC, ENGINE, ENGINE_HF, TRANSFORMERS = "static", "engine", "engine-hf", "transformers"
SYSTEMS = (STATIC, ENGINE, ENGINE_HF, TRANSFORMERS)
#: Requests answered before anything is timed.
WARM_UP = [Item([1], 2), Item([1, 2], 2)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_seq_len": FULL}


class System(Protocol):
    """A compared system."""

    name: str
    cache: str

    @property
    def cache_bytes(self) -> int:
        """Bytes for keys and values."""

    def run(self, items: Sequence[Item], times: Sequence[float] | None = None) -> Run:
        """Serves a load, closed or with arrivals at ``times``."""


class Static:
    """A `Generator` with batches in order of arrival, each as long as its longest answer."""

    name = STATIC

    def __init__(self, model: Any, cache: str) -> None:
        self.cache = cache
        self._generator = Generator(model, cache_kind=cache, max_new_tokens=1, **GREEDY)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the current batch."""
        return int(self._generator.report["cache_bytes"])

    def run(self, items: Sequence[Item], times: Sequence[float] | None = None) -> Run:
        """Takes all waiting requests as a batch, `CONCURRENCY` at most."""
        clients, waiting = Clients(items, times), list[int]()
        while not clients.is_over:
            waiting += clients.due()
            if waiting:
                self._batch(clients, waiting[:CONCURRENCY])
                del waiting[:CONCURRENCY]
            else:
                time.sleep(clients.next_s or 0.0)
        return clients.run(preemptions=0)

    def _batch(self, clients: Clients, batch: list[int]) -> None:
        began = time.perf_counter()
        wanted = [clients.items[number].new_tokens for number in batch]
        for number in batch:
            clients.records[number].started = began
        self._generator.reset()
        prompts = [clients.items[number].prompt for number in batch]
        steps = self._generator.generate_iter(prompts, max_new_tokens=max(wanted))
        for step, _ in enumerate(steps):
            now = time.perf_counter()
            for number, count in zip(batch, wanted, strict=True):
                if step < count:
                    clients.got(number, [now])


class Batching:
    """Our engine; TypeError for a model that cannot take ragged batches."""

    def __init__(self, name: str, model: Any, cache: str, cache_bytes: int) -> None:
        self.name, self.cache = name, cache
        self.engine = Engine(
            model, cache_kind=cache, cache_bytes=cache_bytes, page_size=PAGE_SIZE, max_batch_size=CONCURRENCY,
            max_batch_tokens=BATCH_TOKENS, **GREEDY,
        )  # fmt: skip

    @property
    def cache_bytes(self) -> int:
        """Bytes of the pool."""
        return int(self.engine.report["cache_bytes"])

    def run(self, items: Sequence[Item], times: Sequence[float] | None = None) -> Run:
        """Takes requests as they arrive, after dropping pages of earlier runs."""
        engine, before = self.engine, self.engine.metrics.preemptions
        engine.clear_prefixes()
        clients, added = Clients(items, times), dict[str, float]()
        while not clients.is_over:
            for number in clients.due():
                item, name = items[number], str(number)
                engine.add_request(item.prompt, request_id=name, max_new_tokens=item.new_tokens)
                added[name] = time.perf_counter()
            if engine.has_unfinished:
                self._step(clients, added)
            else:
                time.sleep(clients.next_s or 0.0)
        return clients.run(preemptions=self.engine.metrics.preemptions - before)

    def _step(self, clients: Clients, added: dict[str, float]) -> None:
        events = self.engine.step()
        now = time.perf_counter()
        for event in events:
            number = int(event.request_id)
            if event.output is not None:
                if event.output.error is not None:
                    raise RuntimeError(f"request {number} failed: {event.output.error}")
                waited = event.output.metrics.queue_s
                clients.records[number].started = added[event.request_id] + waited
            clients.got(number, [now] * len(event.tokens))


class Transformers:
    """``ContinuousBatchingManager`` of transformers, driven through its public methods.

    Its pages hold keys and values in the model's own dtype. Every run has its own manager, which is started and answers
    two short requests before the clock starts.
    """

    name = TRANSFORMERS

    def __init__(self, model: Any, cache_bytes: int) -> None:
        self._library = import_module("transformers")
        if not hasattr(self._library, "ContinuousBatchingConfig"):
            raise ImportError(
                f"transformers {self._library.__version__} has no ContinuousBatchingConfig"
            )
        config = model.config
        vector = config.head_dim * config.num_key_value_heads * model.dtype.itemsize
        page = 2 * config.num_hidden_layers * vector * PAGE_SIZE
        self._model, self._blocks = model, cache_bytes // page
        self.cache = str(model.dtype).removeprefix("torch.").replace("float", "fp")
        self.cache_bytes: int = self._blocks * page

    def _manager(self) -> Any:
        generation = self._library.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        settings = self._library.ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=self._blocks, max_batch_tokens=BATCH_TOKENS,
            max_requests_per_batch=CONCURRENCY, auto_switch_to_flash=False,
        )  # fmt: skip
        manager = self._model.init_continuous_batching(generation, settings)
        manager.warmup()
        manager.start()
        return manager

    def run(self, items: Sequence[Item], times: Sequence[float] | None = None) -> Run:
        """Takes requests as they arrive, in the manager's own thread."""
        manager = self._manager()
        try:
            self._drive(manager, Clients(WARM_UP))
            clients = Clients(items, times)
            self._drive(manager, clients)
        finally:
            manager.stop(block=True)
            manager.destroy()
        return clients.run()

    def _drive(self, manager: Any, clients: Clients) -> None:
        while not clients.is_over:
            for number in clients.due():
                item = clients.items[number]
                manager.add_request(
                    item.prompt, request_id=str(number), max_new_tokens=item.new_tokens, record_timestamps=True
                )  # fmt: skip
            wait = clients.next_s
            result = manager.get_result(timeout=STUCK_S if wait is None else max(wait, 1e-3))
            if result is not None and result.is_finished():
                self._note(clients, result)
            elif result is None and (wait is None or not manager.is_running()):
                fault = manager.background_thread_status.fatal_error
                raise RuntimeError(f"its generation thread ended or is stuck: {fault}")

    @staticmethod
    def _note(clients: Clients, result: Any) -> None:
        number = int(result.request_id)
        wanted = clients.items[number].new_tokens
        if result.error is not None or len(result.generated_tokens) != wanted:
            raise RuntimeError(
                f"request {number} got {len(result.generated_tokens)} of {wanted} tokens: {result.error}"
            )
        clients.records[number].started = result.lifespan[0]
        clients.got(number, result.timestamps)


def fp16_bytes(model: Any, requests: int) -> int:
    """Bytes of fp16 pages for so many requests of full length."""
    config = GenerateConfig(cache_kind="fp16", cache_residual_len=0, cache_sink_len=0)
    page, *_ = PagePool.sizes(model.cache_layout, PAGE_SIZE, **config.stream_configs())
    return requests * -(-FULL // PAGE_SIZE) * page


def hf_model() -> Any:
    """The demo model as transformers loads it, in float32."""
    library = import_module("transformers")
    loaded = library.AutoModelForCausalLM.from_pretrained(
        demo_path(), dtype=torch.float32, attn_implementation="sdpa"
    )
    return loaded.eval()
