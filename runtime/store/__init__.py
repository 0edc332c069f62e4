"""Pages of keys and values on disk: found again by what they depend on, checked on every read, safe from any crash."""

from .page_head import NO_PARENT, PageHead, StoreIdentity
from .page_store import PageStore
from .store_stats import PutResult, RecoveryReport, StoreStats

__all__ = ["NO_PARENT", "PageHead", "PageStore", "PutResult", "RecoveryReport", "StoreIdentity", "StoreStats"]
