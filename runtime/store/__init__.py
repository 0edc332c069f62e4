"""Pages of keys and values on disk: found again by what they depend on, checked on every read, safe from any crash."""

from .beside_record import Beside, StoredAlias, StoredCall
from .bundle import ImportReport, export_bundle, import_bundle, is_bundle
from .files import Files, OSFiles
from .page_key import NO_PARENT, PageKey, StoreIdentity
from .page_store import PageStore
from .store_state import GCReport, PutResult, RecoveryReport, StoreStats, VerifyReport

__all__ = [
    "NO_PARENT",
    "Beside",
    "Files",
    "GCReport",
    "ImportReport",
    "OSFiles",
    "PageKey",
    "PageStore",
    "PutResult",
    "RecoveryReport",
    "StoreIdentity",
    "StoreStats",
    "StoredAlias",
    "StoredCall",
    "VerifyReport",
    "export_bundle",
    "import_bundle",
    "is_bundle",
]
