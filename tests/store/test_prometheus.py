"""Prometheus gets the store's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tests.store.helpers import PAGE, open_store, pages, push_out
from tierstore.prometheus import StoreCollector


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry that collects at registration, as the usual one does."""
    return CollectorRegistry(auto_describe=True)


def test_metrics_equal_the_stores_figures(disk_dir: Path, registry: CollectorRegistry) -> None:
    with open_store(disk_dir) as store:
        registry.register(StoreCollector({"main": store}))
        store.put("key", pages(1, 2))
        push_out(store, "key")
        store.get("key")
        store.get("key")
        stats = store.stats()

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"tierstore_{name}", {"store": "main", **labels})

        assert value("acquires_total", met="hit") == stats.hits == 1
        assert value("acquires_total", met="late") == stats.late
        assert value("acquires_total", met="miss") == stats.misses
        assert value("stalled_seconds_total") == stats.stalled_seconds > 0
        assert value("overlap_ratio") == stats.overlap
        assert value("moved_bytes_total", hop="DISK>HOST") == stats.bytes_read > 0
        assert value("moved_bytes_total", hop="HOST>DISK") == stats.bytes_written > 0
        for hop, seconds in stats.busy_seconds.items():
            assert value("busy_seconds_total", hop=hop) == seconds > 0
        for tier in ("HOST", "DISK"):
            assert value("used_bytes", tier=tier) == stats.used_bytes[tier] == 2 * PAGE
            assert value("peak_bytes", tier=tier) == stats.peak_bytes[tier]
        assert value("budget_bytes", tier="HOST") == stats.budget_bytes["HOST"]
        assert value("budget_bytes", tier="DISK") is None, "it has no limit"


def test_metrics_are_sampled_on_each_scrape(disk_dir: Path, registry: CollectorRegistry) -> None:
    with open_store(disk_dir) as store:
        registry.register(StoreCollector({"main": store}))
        labels = {"store": "main", "tier": "HOST"}
        assert registry.get_sample_value("tierstore_used_bytes", labels) == 0
        store.put("key", pages(1))
        assert registry.get_sample_value("tierstore_used_bytes", labels) == PAGE


def test_metrics_of_several_stores_share_families(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    with open_store(tmp_path / "a") as one, open_store(tmp_path / "b") as other:
        stores = {"one": one}
        registry.register(StoreCollector(stores))
        stores["other"] = other
        text = generate_latest(registry).decode()
        assert text.count("# TYPE tierstore_stalled_seconds_total counter") == 1
        assert 'tierstore_stalled_seconds_total{store="one"} 0.0' in text
        assert 'tierstore_stalled_seconds_total{store="other"} 0.0' in text
    del stores["one"]
    text = generate_latest(registry).decode()
    assert 'store="one"' not in text
    assert 'store="other"' in text, "a closed store reports its last numbers"
