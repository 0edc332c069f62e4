"""KV pages on disk: found by a hash of everything they depend on, checked on every read, and safe from crashes."""

from .bundle import ImportReport, export_bundle, import_bundle, is_bundle
from .files import Files, OSFiles
from .page_key import NO_PARENT, PageKey, StoreIdentity
from .page_store import PageStore
from .small_record import SmallRecord, StoredAlias, StoredCall
from .store_state import GCReport, PutResult, RecoveryReport, StoreStats, VerifyReport

__all__ = [
    "NO_PARENT",
    "Files",
    "GCReport",
    "ImportReport",
    "OSFiles",
    "PageKey",
    "PageStore",
    "PutResult",
    "RecoveryReport",
    "SmallRecord",
    "StoreIdentity",
    "StoreStats",
    "StoredAlias",
    "StoredCall",
    "VerifyReport",
    "export_bundle",
    "import_bundle",
    "is_bundle",
]
