"""An engine's metrics in the format of Prometheus."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from caramba_fast.serve.metrics import Counters, EngineMetrics

PREFIX = "caramba_fast_"
#: Metrics that are counters; the others are gauges.
COUNTED = frozenset(Counters().saved())


class _Figures(Collector):
    def __init__(self, metrics: EngineMetrics) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        for field in dataclasses.fields(self.metrics):
            value = float(getattr(self.metrics, field.name))
            name = f"{PREFIX}{field.name}"
            said = f"EngineMetrics.{field.name}"
            if field.name in COUNTED:
                found: Metric = CounterMetricFamily(name, said, value=value)
            else:
                found = GaugeMetricFamily(name, said, value=0.0 if math.isnan(value) else value)
            yield found


def exposition(metrics: EngineMetrics) -> bytes:
    """The metrics in Prometheus' text format; those not measured yet are 0."""
    registry = CollectorRegistry()
    registry.register(_Figures(metrics))
    return generate_latest(registry)
