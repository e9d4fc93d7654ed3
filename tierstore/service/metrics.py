"""The numbers of a service for Prometheus. Needs `pip install tierstore[metrics]`."""

from __future__ import annotations

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
        for row in self._server.report(0).workers:
            worker = [str(row.pid), row.name]
            leased.add_metric(worker, row.leased_bytes)
            waits.add_metric(worker, row.waits)
            granted.add_metric([*worker, "hit"], row.hits)
            granted.add_metric([*worker, "miss"], row.granted - row.hits)
        yield from (leased, waits, granted)


def serve_metrics(server: Server, port: int) -> None:
    """Serve them on `port` of the local machine, on a thread. Raises OSError if it is taken."""
    registry = CollectorRegistry()
    registry.register(StoreCollector({"service": server.engine.reporting}))
    registry.register(WorkerCollector(server))
    start_http_server(port, addr="127.0.0.1", registry=registry)
