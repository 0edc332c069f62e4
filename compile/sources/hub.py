"""Models of the Hugging Face hub: `hf:ORG/NAME`, or `hf:ORG/NAME@REVISION`.

Knows which files of a repository make a model, shards by whatever names its index gives them; downloads them into the
hub library's own cache, which other tools share. `HF_ENDPOINT` and `HF_TOKEN` are respected.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from glob import escape
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.utils.tqdm import tqdm
from radixlm.runtime.errors import SourceNotFound

from .model_files import INDEX, WEIGHTS, read_index

PREFIX = "hf:"
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
)


def download(
    reference: str, *, cache_dir: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The directory of the model `hf:ORG/NAME[@REVISION]`; files that are there already are not fetched again.

    `progress` gets the bytes that are here and those in all, from threads; without it the hub's own bars are shown.

    Raises SourceNotFound where the hub cannot be reached or has no such model, CorruptSource for a damaged index.
    """
    directory = download_files(reference, FILES, cache_dir=cache_dir, progress=progress)
    if not (directory / WEIGHTS).is_file() and (directory / INDEX).is_file():
        shards = sorted(set(read_index(directory / INDEX).values()))
        same_commit = f"{reference.partition('@')[0]}@{directory.name}"
        names = [escape(name) for name in shards]
        directory = download_files(same_commit, names, cache_dir=cache_dir, progress=progress)
    return directory


def download_files(
    reference: str,
    files: Sequence[str],
    *,
    cache_dir: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The directory of the files of a model whose names match a pattern of `files`; raises SourceNotFound."""
    repo_id, _, revision = reference.removeprefix(PREFIX).partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None  # read now; the library reads it when it is imported
    try:
        path = huggingface_hub.snapshot_download(
            repo_id,
            revision=revision or None,
            allow_patterns=list(files),
            cache_dir=None if cache_dir is None else cache_dir / "hub",
            endpoint=endpoint,
            tqdm_class=None if progress is None else _reporting_bar(progress),
        )
    except Exception as error:  # the library lets its HTTP client's errors through, whichever client it has
        raise SourceNotFound(
            f"{reference} cannot be had from {endpoint or 'the hub'} ({_first_line(error)}); "
            "check the name, the network and, for a gated model, HF_TOKEN"
        ) from error
    return Path(path)


def _reporting_bar(progress: Callable[[int, int], None]) -> type[tqdm]:
    """A class of bars that report bytes, and draw nothing.

    The hub counts the same bytes on two bars, as received and as written to disk, of which some transports move one.
    A third bar counts files.
    """
    done: dict[str, int] = {}  # bytes, by the bar's description when it was made

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self._name = str(options.get("desc"))
            super().__init__(*args, **options | {"file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> bool:
            if self.unit == "B" and self.total:
                done[self._name] = int(self.n)
                progress(max(done.values()), int(self.total))
            return True

    return Bar


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
