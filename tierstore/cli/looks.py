"""What a service, or the stores of a process, did between two looks.

A service tells by its socket; the stores of a process by the page that they have for Prometheus.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.cli.output import Code, Document, Failure
from tierstore.cli.page import page_at

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SERVICE = "service"
"""What a service calls its own store in its metrics."""

_HIT = "hit"


@dataclass
class WorkerLook:
    """A worker by some moment: what it leases and waits for, and how many leases it was granted."""

    pid: str
    name: str
    leased_bytes: float = 0
    waits: float = 0
    granted: float = 0
    hits: float = 0


@dataclass
class Look:
    """A service or a store by some moment (`at`, of `time.monotonic`).

    `tiers` has the bytes used and the budget, `moved` the bytes moved by hop, both since the start.
    `acquires` counts hits and what was not there in time; None if only workers have such numbers.
    """

    name: str
    at: float = field(default_factory=time.monotonic)
    tiers: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    acquires: dict[str, float] | None = None
    workers: dict[str, WorkerLook] = field(default_factory=dict)


def look_at_service(service: Document) -> Look:
    """A look at a service, from what it tells (`services.service_row`)."""
    return Look(
        f"{service['directory']} by process {service['pid']} at {service['socket']}",
        tiers={name: (tier["used"], tier["budget"]) for name, tier in service["tiers"].items()},
        moved={"DISK>HOST": service["bytes_read"], "HOST>DISK": service["bytes_written"]},
        workers={
            f"{worker['pid']} {worker['name']} {worker['since']}": WorkerLook(
                str(worker["pid"]),
                worker["name"],
                worker["leased_bytes"],
                worker["waits"],
                worker["granted"],
                worker["hits"],
            )
            for worker in service["workers"]
        },
    )


def rates(before: Look | None, after: Look) -> Document:
    """A look, with what was done in each second since an earlier one; None where nobody knows."""
    seconds = None if before is None else max(after.at - before.at, 1e-9)
    earlier = before or Look(after.name)

    def rate(count: float, known: float | None) -> float | None:
        if seconds is None or known is None:
            return None
        return max(count - known, 0.0) / seconds  # it counts from 0 if it was started again

    workers = []
    for key, worker in after.workers.items():
        was = earlier.workers.get(key)
        row = {
            "pid": worker.pid,
            "name": worker.name,
            "leased_bytes": worker.leased_bytes,
            "waits": worker.waits,
            "acquires_per_second": rate(worker.granted, None if was is None else was.granted),
            "hits_per_second": rate(worker.hits, None if was is None else was.hits),
        }
        workers.append(row)
    if after.acquires is None:
        hits = [row["hits_per_second"] for row in workers]
        acquires = [row["acquires_per_second"] for row in workers]
    else:
        known = earlier.acquires or {}
        by_kind = {kind: rate(count, known.get(kind)) for kind, count in after.acquires.items()}
        hits, acquires = [by_kind.get(_HIT)], list(by_kind.values())
    return {
        "name": after.name,
        "seconds": seconds,
        "tiers": {name: {"used": u, "budget": b} for name, (u, b) in after.tiers.items()},
        "bytes_per_second": {
            hop: rate(count, earlier.moved.get(hop)) for hop, count in after.moved.items()
        },
        "hits_per_second": None if seconds is None else sum(one or 0.0 for one in hits),
        "acquires_per_second": None if seconds is None else sum(one or 0.0 for one in acquires),
        "workers": workers,
    }


# Pages for Prometheus -----------------------------------------------------------------------------


def looks_at_page(url: str) -> list[Look]:
    """A look at each of the stores that tell of themselves at a URL. Raises Failure."""
    _parser()  # before anybody is asked
    try:
        text = page_at(url)
    except (OSError, ValueError) as error:
        raise _no_page(url, str(error)) from error
    return looks_in(text, url)


def looks_in(text: str, url: str) -> list[Look]:
    """A look at each of the stores in the text of a page, in Prometheus' format. Raises Failure."""
    samples: dict[str, list[Any]] = defaultdict(list)
    try:
        for family in _parser()(text):
            for sample in family.samples:
                if sample.name.startswith("tierstore_"):
                    samples[sample.name].append(sample)
        looks = _stores(samples, url)
    except (ValueError, KeyError, IndexError) as error:
        raise _no_page(url, f"it is no page of metrics ({error})") from error
    if not looks:
        raise _no_page(url, "no store tells anything there")
    return list(looks.values())


def _parser() -> Callable[[str], Iterable[Metric]]:
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise Failure(
            f"to read metrics takes a package that is missing ({error.name})",
            "Install it: pip install 'tierstore[metrics]'",
        ) from error
    return text_string_to_metric_families


def _stores(samples: Mapping[str, list[Any]], url: str) -> dict[str, Look]:
    looks: dict[str, Look] = {}

    def of(sample: Any) -> Look:
        name = sample.labels["store"]
        return looks.setdefault(name, Look(f"{name} at {url}"))

    for sample in samples["tierstore_used_bytes"]:
        of(sample).tiers[sample.labels["tier"]] = (sample.value, None)
    for sample in samples["tierstore_budget_bytes"]:
        tiers, tier = of(sample).tiers, sample.labels["tier"]
        tiers[tier] = (tiers.get(tier, (0.0, None))[0], sample.value)
    for sample in samples["tierstore_moved_bytes_total"]:
        of(sample).moved[sample.labels["hop"]] = sample.value
    for sample in samples["tierstore_acquires_total"]:
        look = of(sample)
        look.acquires = {**(look.acquires or {}), sample.labels["met"]: sample.value}
    if SERVICE in looks and "tierstore_worker_waits" in samples:
        looks[SERVICE].workers = _workers(samples)
        looks[SERVICE].acquires = None
    return looks


def _workers(samples: Mapping[str, list[Any]]) -> dict[str, WorkerLook]:
    workers: dict[str, WorkerLook] = {}

    def of(sample: Any) -> WorkerLook:
        pid, name = sample.labels["worker"], sample.labels["name"]
        return workers.setdefault(f"{pid} {name}", WorkerLook(pid, name))

    for sample in samples["tierstore_worker_leased_bytes"]:
        of(sample).leased_bytes += sample.value
    for sample in samples["tierstore_worker_waits"]:
        of(sample).waits += sample.value
    for sample in samples["tierstore_worker_leases_total"]:
        worker = of(sample)
        worker.granted += sample.value
        worker.hits += sample.value if sample.labels["met"] == _HIT else 0
    return workers


def _no_page(url: str, why: str) -> Failure:
    return Failure(
        f"{url} cannot be looked at: {why}",
        "Give the URL that Prometheus reads, such as http://127.0.0.1:9400/metrics.",
        Code.UNEXPECTED,
    )
