"""Metrics of stores for Prometheus. Needs `pip install tierstore[metrics]`.

>>> from prometheus_client import CollectorRegistry, generate_latest
>>> registry = CollectorRegistry()
>>> registry.register(StoreCollector({}))
>>> b"# TYPE tierstore_stalled_seconds_total counter" in generate_latest(registry)
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.observe.stats import BYTES_MOVED, Stats

Rows = Iterator[tuple[list[str], float]]


class HasStats(Protocol):
    """A `TierStore`."""

    def stats(self) -> Stats: ...


class StoreCollector(Collector):
    """Collects the statistics of stores for Prometheus, on each scrape.

        REGISTRY.register(StoreCollector({"weights": store}))

    One collector serves all stores of a process. A closed store keeps reporting its last numbers
    until it is removed from the mapping.

    Args:
        stores: stores by the value of their label `store`. The mapping is read on each scrape, so
            it may change.
    """

    def __init__(self, stores: Mapping[str, HasStats]) -> None:
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their labels."""
        stats = {name: store.stats() for name, store in dict(self._stores).items()}
        for family, rows_of in _families():
            for name, of_one in stats.items():
                for labels, value in rows_of(of_one):
                    family.add_metric([name, *labels], value)
            yield family


def _families() -> Iterator[
    tuple[CounterMetricFamily | GaugeMetricFamily, Callable[[Stats], Rows]]
]:
    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"tierstore_{name}", text, labels=["store", *labels])

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"tierstore_{name}", text, labels=["store", *labels])

    yield (
        counter(
            "acquires", "Acquires by outcome: hit, late (the group was on its way) or miss.", "met"
        ),
        _acquires,
    )
    yield (
        counter("stalled_seconds", "Seconds that acquires waited."),
        lambda s: _one(s.stalled_seconds),
    )
    text = "Fraction of transfer time during which no acquire waited."
    yield gauge("overlap_ratio", text), lambda s: _one(s.overlap)
    yield counter("moved_bytes", "Bytes moved between two tiers.", "hop"), _moved
    text = "Seconds during which bytes moved between two tiers."
    yield counter("busy_seconds", text, "hop"), lambda s: _rows(s.busy_seconds)
    yield gauge("used_bytes", "Bytes in use on a tier.", "tier"), lambda s: _rows(s.used_bytes)
    text = "Peak bytes in use on a tier."
    yield gauge("peak_bytes", text, "tier"), lambda s: _rows(s.peak_bytes)
    text = "Budget of a tier in bytes."
    yield gauge("budget_bytes", text, "tier"), lambda s: _rows(s.budget_bytes)
    text = "Accelerator memory that torch has reserved for this process, including its cache."
    yield gauge("reserved_bytes", text, "tier"), lambda s: _rows(s.reserved_bytes)


def _one(value: float) -> Rows:
    yield [], value


def _rows(values: Mapping[str, float | None]) -> Rows:
    return (([label], value) for label, value in values.items() if value is not None)


def _acquires(stats: Stats) -> Rows:
    return _rows({"hit": stats.hits, "late": stats.late, "miss": stats.misses})


def _moved(stats: Stats) -> Rows:
    return _rows({hop: getattr(stats, field) for hop, field in BYTES_MOVED.items()})
