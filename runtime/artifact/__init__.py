"""The artifact of a compiled model: its manifest, its files, verified before use, and the CPUs that it runs on."""

from .directory import (
    CHAT_TEMPLATE,
    MANIFEST,
    MODULE,
    TOKENIZER,
    WEIGHTS,
    Artifact,
    cache_dir,
    read_manifest,
    sha256_of,
    write_manifest,
)

__all__ = [
    "CHAT_TEMPLATE",
    "MANIFEST",
    "MODULE",
    "TOKENIZER",
    "WEIGHTS",
    "Artifact",
    "cache_dir",
    "read_manifest",
    "sha256_of",
    "write_manifest",
]
