"""Samples services and stores, and computes rates between two samples.

A service is sampled through its socket, a process with stores through its Prometheus page.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.cli.output import Code, Document, Failure

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SERVICE = "service"
"""The name of a service's own store in its metrics."""
PAGE_SECONDS = 5.0
"""Timeout of each read of a page, in seconds."""
PAGE_BYTES = 16 << 20

_HIT = "hit"


@dataclass
class WorkerSample:
    """A worker at one moment: bytes leased, leases it waits for, and counts since its start."""

    pid: str
    name: str
    leased_bytes: float = 0
    waits: float = 0
    granted: float = 0
    hits: float = 0


@dataclass
class Sample:
    """A service or a store at the moment `at` (of `time.monotonic`).

    `tiers` has the bytes used and the budget of each tier, `moved` the bytes by hop since the
    start. `acquires` counts hits, late acquires and misses; None for a service, where only workers
    have such counts.
    """

    name: str
    at: float = field(default_factory=time.monotonic)
    tiers: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    acquires: dict[str, float] | None = None
    workers: dict[str, WorkerSample] = field(default_factory=dict)


def sample_of_service(service: Document) -> Sample:
    """Return a sample of a service, given its row (see `services.service_row`)."""
    counted = ("leased_bytes", "waits", "granted", "hits")
    return Sample(
        f"{service['directory']} by process {service['pid']} at {service['socket']}",
        tiers={name: (tier["used"], tier["budget"]) for name, tier in service["tiers"].items()},
        moved={"DISK>HOST": service["bytes_read"], "HOST>DISK": service["bytes_written"]},
        workers={
            f"{one['pid']} {one['name']} {one['since']}": WorkerSample(
                str(one["pid"]), one["name"], *(one[name] for name in counted)
            )
            for one in service["workers"]
        },
    )


def rates(before: Sample | None, after: Sample) -> Document:
    """Describe a sample, with rates per second since an earlier one; None if unknown."""
    seconds = None if before is None else max(after.at - before.at, 1e-9)
    earlier = before or Sample(after.name)

    def rate(count: float, known: float | None) -> float | None:
        if seconds is None or known is None:
            return None
        return max(count - known, 0.0) / seconds  # a restarted process counts from 0

    def sum_of(found: Iterable[float | None]) -> float | None:
        return None if seconds is None else sum(one or 0.0 for one in found)

    workers = []
    for key, one in after.workers.items():
        was = earlier.workers.get(key)
        row = {name: getattr(one, name) for name in ("pid", "name", "leased_bytes", "waits")}
        row["acquires_per_second"] = rate(one.granted, was.granted if was else None)
        row["hits_per_second"] = rate(one.hits, was.hits if was else None)
        workers.append(row)
    if after.acquires is None:
        hits = [row["hits_per_second"] for row in workers]
        acquires = [row["acquires_per_second"] for row in workers]
    else:
        known = earlier.acquires or {}
        by_kind = {kind: rate(count, known.get(kind)) for kind, count in after.acquires.items()}
        hits, acquires = [by_kind.get(_HIT)], list(by_kind.values())
    moved = after.moved.items()
    return {
        "name": after.name,
        "seconds": seconds,
        "tiers": {name: {"used": u, "budget": b} for name, (u, b) in after.tiers.items()},
        "bytes_per_second": {hop: rate(count, earlier.moved.get(hop)) for hop, count in moved},
        "hits_per_second": sum_of(hits),
        "acquires_per_second": sum_of(acquires),
        "workers": workers,
    }


# Pages for Prometheus -----------------------------------------------------------------------------


def samples_at(url: str) -> list[Sample]:
    """Sample each store on the page at a URL. Raises Failure."""
    _parser()  # a missing package is an error before any request
    try:
        text = page_at(url)
    except (OSError, ValueError) as error:
        raise _no_page(url, str(error)) from error
    return samples_in(text, url)


def page_at(url: str) -> str:
    """Return the text at an http or https URL. Raises OSError or ValueError."""
    import http.client  # imported here so that the command line starts fast
    import urllib.request

    # No proxy: the process is on this machine, or near it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PAGE_SECONDS) as answer:
            found: bytes = answer.read(PAGE_BYTES + 1)
    except http.client.HTTPException as error:
        raise ValueError(f"the answer is not HTTP ({type(error).__name__})") from error
    if len(found) > PAGE_BYTES:
        raise ValueError(f"the page has more than {PAGE_BYTES:,} bytes")
    return found.decode()


def samples_in(text: str, url: str) -> list[Sample]:
    """Sample each store in a page of metrics. Raises Failure."""
    metrics: dict[str, list[Any]] = defaultdict(list)
    try:
        for family in _parser()(text):
            for metric in family.samples:
                metrics[metric.name.removeprefix("tierstore_")].append(metric)
        found = _stores(metrics, url)
    except (ValueError, KeyError, IndexError) as error:
        raise _no_page(url, f"it is not a page of metrics ({error})") from error
    if not found:
        raise _no_page(url, "it has no metrics of a store")
    return found


def _parser() -> Callable[[str], Iterable[Metric]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise Failure(
            f"reading metrics requires a missing package ({error.name})",
            "Install it: pip install 'tierstore[metrics]'",
        ) from error
    return text_string_to_metric_families


def _stores(metrics: dict[str, list[Any]], url: str) -> list[Sample]:
    found: dict[str, Sample] = {}
    for metric in metrics["used_bytes"]:
        name, tier = metric.labels["store"], metric.labels["tier"]
        found.setdefault(name, Sample(f"{name} at {url}")).tiers[tier] = (metric.value, None)
    for metric in metrics["budget_bytes"]:
        tiers, tier = found[metric.labels["store"]].tiers, metric.labels["tier"]
        tiers[tier] = (tiers.get(tier, (0.0, None))[0], metric.value)
    for metric in metrics["moved_bytes_total"]:
        found[metric.labels["store"]].moved[metric.labels["hop"]] = metric.value
    for metric in metrics["acquires_total"]:
        one = found[metric.labels["store"]]
        one.acquires = {**(one.acquires or {}), metric.labels["met"]: metric.value}
    if SERVICE in found and "worker_waits" in metrics:
        found[SERVICE].acquires = None
        found[SERVICE].workers = _workers(metrics)
    return list(found.values())


def _workers(metrics: dict[str, list[Any]]) -> dict[str, WorkerSample]:
    found: dict[str, WorkerSample] = {}

    def add(metric: Any, field: str) -> None:
        pid, name = metric.labels["worker"], metric.labels["name"]
        worker = found.setdefault(f"{pid} {name}", WorkerSample(pid, name))
        setattr(worker, field, getattr(worker, field) + metric.value)

    for metric in metrics["worker_leased_bytes"]:
        add(metric, "leased_bytes")
    for metric in metrics["worker_waits"]:
        add(metric, "waits")
    for metric in metrics["worker_leases_total"]:
        add(metric, "granted")
        if metric.labels["met"] == _HIT:
            add(metric, "hits")
    return found


def _no_page(url: str, why: str) -> Failure:
    return Failure(
        f"{url} cannot be read: {why}",
        "Give the URL that Prometheus scrapes, such as http://127.0.0.1:9400/metrics.",
        Code.UNEXPECTED,
    )
