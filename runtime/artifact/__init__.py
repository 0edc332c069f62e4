"""What an artifact is: its manifest, its files, checked before anything is used, and the processors it runs on."""

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
