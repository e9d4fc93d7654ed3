"""The numbers of a service for Prometheus. Needs `pip install tierstore[metrics]`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.observe.prometheus import StoreCollector
from tierstore.service.server import Server


class WorkerCollector(Collector):
    """What each worker leases and waits for, by its process and name."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Every number there is, with its labels. Called by another thread than the server's."""
        labels = ["worker", "name"]
        leased = GaugeMetricFamily(
            "tierstore_worker_leased_bytes", "Bytes that a worker leases.", labels=labels
        )
        waits = GaugeMetricFamily(
            "tierstore_worker_waits", "Leases that a worker waits for.", labels=labels
        )
        granted = CounterMetricFamily(
            "tierstore_worker_leases", "Leases granted: at once, or later.", labels=[*labels, "met"]
        )
        # A process may have several stores: Prometheus takes each set of labels once.
        numbers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for row in self._server.report(0).workers:
            of_one = numbers[str(row.pid), row.name]
            of_one["leased"] += row.leased_bytes
            of_one["waits"] += row.waits
            of_one["hits"] += row.hits
            of_one["misses"] += row.granted - row.hits
        for worker, of_one in numbers.items():
            leased.add_metric(worker, of_one["leased"])
            waits.add_metric(worker, of_one["waits"])
            granted.add_metric([*worker, "hit"], of_one["hits"])
            granted.add_metric([*worker, "miss"], of_one["misses"])
        yield from (leased, waits, granted)


def serve_metrics(server: Server, port: int) -> None:
    """Serve them on `port` of the local machine, on a thread. Raises OSError if it is taken."""
    registry = CollectorRegistry()
    registry.register(StoreCollector({"service": server.engine.reporting}))
    registry.register(WorkerCollector(server))
    start_http_server(port, addr="127.0.0.1", registry=registry)
