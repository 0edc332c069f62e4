"""Models of the Hugging Face hub: `hf:ORG/NAME`, `hf:ORG/NAME:QUANTIZATION` or `hf:ORG/NAME/FILE.gguf`, `@REVISION`.

Knows which files of a repository make a model; shards have the names in its index. They are kept in the hub library's
own cache, which other tools share. `HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` are respected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from radixlm.runtime.artifact.local_models import INDEX, WEIGHTS
from radixlm.runtime.artifact.model_names import HUB, HubName, part_names
from radixlm.runtime.errors import SourceNotFound

from ..model_files import read_index
from ..text_vectors import FILES as VECTOR_FILES
from .gguf_choice import choose_gguf, list_quantizations
from .repository import Repository, repositories

__all__ = ["FILES", "PREFIX", "download", "download_files", "find_download", "names_gguf", "repositories"]

PREFIX = HUB
FILES = (
    "config.json",
    "generation_config.json",
    WEIGHTS,
    INDEX,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "processor_config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "mlc-chat-config.json",
    "tensor-cache.json",
    "ndarray-cache.json",
    "params_shard_*.bin",
    *VECTOR_FILES,
)

_WEIGHTS = (WEIGHTS, INDEX, "params_shard_*.bin")

Downloaded = Callable[[int, int], None]
"""Gets the bytes of a download that are here, and those in all, from any thread."""


def download(reference: str, *, cache_dir: Path | None = None, progress: Downloaded | None = None) -> Path:
    """Return the directory of a model, or its GGUF file, or the first part of a split one.

    Files in the cache are not fetched again. An interrupted download is resumed. Every file is verified if the hub has
    its sha256. If the hub is unreachable, files fetched earlier are used.

    Args:
        progress: called with bytes done and total; if None, the hub's own bars are shown.

    Raises:
        SourceNotFound: the hub is unreachable, or has no such model or file.
        CorruptSource: a file has another sha256 than the hub says, or an index is damaged.
    """
    return _download(reference, cache_dir, progress, is_offline=False)


def find_download(reference: str, *, cache_dir: Path | None = None) -> Path | None:
    """Return what `download` would, if it is in the cache; None otherwise. The hub is not contacted.

    A directory may lack files that only the hub knows.
    """
    try:
        return _download(reference, cache_dir, None, is_offline=True)
    except SourceNotFound:
        return None


def names_gguf(reference: str) -> bool:
    """Return whether the name alone says that the model is a GGUF file."""
    name = HubName.parse(reference)
    return name.file is not None or name.quantization is not None


def download_files(reference: str, patterns: Sequence[str], *, cache_dir: Path | None = None) -> Path:
    """Return the directory of a model's files whose names match one of `patterns`.

    Raises:
        SourceNotFound, CorruptSource: as `download`.
    """
    repository = Repository.open(reference, cache_dir)
    files = _matching(repository.sizes, patterns)
    if not files:
        raise SourceNotFound(
            f"{reference} has no configuration, and {list_quantizations(repository.sizes)}; fetch it first"
        )
    return repository.fetch(files)


def _download(reference: str, cache_dir: Path | None, progress: Downloaded | None, *, is_offline: bool) -> Path:
    """Fetch the files that make a model, or with `is_offline` find them in the cache.

    Returns the model's directory, or its GGUF file, the first part of a split one.
    """
    name, repository = HubName.parse(reference), Repository.open(reference, cache_dir, is_offline=is_offline)
    files = _matching(repository.sizes, FILES)
    if name.file is not None:
        if name.file not in repository.sizes:
            raise SourceNotFound(
                f"{reference} is no file of {name.repository}; it has {list_quantizations(repository.sizes)}"
            )
        files = part_names(name.file)
    elif name.quantization is not None or not _has_weights(repository.sizes):
        files = choose_gguf(repository.sizes, name.quantization, reference)
    directory = repository.fetch(files, progress)
    if files[0].lower().endswith(".gguf"):
        return directory / files[0]
    if not (directory / WEIGHTS).is_file() and (directory / INDEX).is_file():
        repository.fetch(sorted(set(read_index(directory / INDEX).values())), progress)
    return directory


def _has_weights(names: Collection[str]) -> bool:
    """Return whether a repository has other weights than GGUF files, or no such files either."""
    return bool(_matching(names, _WEIGHTS)) or not any(name.lower().endswith(".gguf") for name in names)


def _matching(names: Collection[str], patterns: Sequence[str]) -> list[str]:
    """Return the names that match one of the patterns."""
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
