"""A Prometheus collector for stores. Needs `pip install tierstore[metrics]`."""

from tierstore.model.extras import extra_for

with extra_for("to export metrics to Prometheus"):
    from tierstore.observe.prometheus import StoreCollector

__all__ = ["StoreCollector"]
