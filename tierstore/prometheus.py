"""The numbers of stores for Prometheus. Needs `pip install tierstore[metrics]`."""

from tierstore.observe.prometheus import StoreCollector

__all__ = ["StoreCollector"]
