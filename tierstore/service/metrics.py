"""Prometheus metrics of a service. Needs `pip install tierstore[metrics]`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.observe.prometheus import StoreCollector
from tierstore.service.server import Server


class WorkerCollector(Collector):
    """The leases and pending requests of each worker, labelled by process and name."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. Called by another thread than the server's."""
        labels = ["worker", "name"]
        leased = GaugeMetricFamily(
            "tierstore_worker_leased_bytes", "Bytes leased by a worker.", labels=labels
        )
        waits = GaugeMetricFamily(
            "tierstore_worker_waits", "Pending lease requests of a worker.", labels=labels
        )
        granted = CounterMetricFamily(
            "tierstore_worker_leases",
            "Leases granted, at once (hit) or later (miss).",
            labels=[*labels, "met"],
        )
        # Sum the stores of one process: Prometheus accepts each set of labels once.
        numbers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for row in self._server.report(0).workers:
            totals = numbers[str(row.pid), row.name]
            totals["leased"] += row.leased_bytes
            totals["waits"] += row.waits
            totals["hits"] += row.hits
            totals["misses"] += row.granted - row.hits
        for worker, totals in numbers.items():
            leased.add_metric(worker, totals["leased"])
            waits.add_metric(worker, totals["waits"])
            granted.add_metric([*worker, "hit"], totals["hits"])
            granted.add_metric([*worker, "miss"], totals["misses"])
        yield from (leased, waits, granted)


def serve_metrics(server: Server, port: int) -> None:
    """Serve the metrics on `port` of localhost, on a thread. Raises OSError if it is taken."""
    registry = CollectorRegistry()
    registry.register(StoreCollector({"service": server.engine.reporting}))
    registry.register(WorkerCollector(server))
    start_http_server(port, addr="127.0.0.1", registry=registry)
