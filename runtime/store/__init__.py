"""Pages of keys and values on disk: found again by what they depend on, checked on every read, safe from any crash."""

from .bundle import ImportReport, export_bundle, import_bundle
from .files import Files, OSFiles
from .page_head import NO_PARENT, PageHead, StoreIdentity
from .page_store import PageStore
from .store_stats import GCReport, PutResult, RecoveryReport, StoreStats, VerifyReport
from .throttled_files import ThrottledFiles

__all__ = [
    "NO_PARENT",
    "Files",
    "GCReport",
    "ImportReport",
    "OSFiles",
    "PageHead",
    "PageStore",
    "PutResult",
    "RecoveryReport",
    "StoreIdentity",
    "StoreStats",
    "ThrottledFiles",
    "VerifyReport",
    "export_bundle",
    "import_bundle",
]
