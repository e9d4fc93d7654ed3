"""The numbers of stores for Prometheus. Needs `pip install tierstore[metrics]`."""

from tierstore.model.extras import extra_for

with extra_for("to tell Prometheus of stores"):
    from tierstore.observe.prometheus import StoreCollector

__all__ = ["StoreCollector"]
