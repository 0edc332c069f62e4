"""How many KV pages to allocate: what was asked for, or a sensible share of the memory that is available.

Knows bytes and pages. Nothing is allocated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .errors import InvalidParameter
from .manifest import PAGE_SIZE, Manifest
from .sequence import num_pages_for

MIN_CONTEXT_LENGTH = 128  # tokens; a cache that holds less answers nothing useful
MAX_NUM_PAGES = 2**31 // PAGE_SIZE - 1  # a slot is an int32
SPARE_PAGES = 1  # for a page that is reused in part, whose rows lie there twice for a moment
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class KVBudget:
    """Pages to allocate, and the context length that they hold."""

    num_pages: int
    context_length: int  # tokens of prompt and reply together

    @classmethod
    def choose(
        cls,
        manifest: Manifest,
        *,
        kv_cache_bytes: int | None,
        max_num_seqs: int,
        available_bytes: int | None = None,
    ) -> KVBudget:
        """Pages for `kv_cache_bytes`, or by default for a quarter of `available_bytes` (asked of the system
        if None).

        The default is at most what `max_num_seqs` full contexts fill and what weights and workspace leave, and at
        least one full context if half of the available memory holds that.

        Raises:
            InvalidParameter: the pages hold less than `MIN_CONTEXT_LENGTH` tokens, or the model's context if that is
                shorter; or they do not fit the available memory beside weights and workspace.
        """
        page_bytes = manifest.kv.page_bytes
        available = available_memory_bytes() if available_bytes is None else available_bytes
        model_bytes = manifest.module.weights_bytes + manifest.module.workspace_bytes
        full_context = num_pages_for(manifest.context_length) + SPARE_PAGES
        if kv_cache_bytes is None:
            quarter, half = available // 4 // page_bytes, available // 2 // page_bytes
            wanted = max_num_seqs * num_pages_for(manifest.context_length) + SPARE_PAGES
            most = max(0, available - model_bytes) // page_bytes
            num_pages = min(wanted, most, max(quarter, min(full_context, half)))
            given = f"what the model's {model_bytes} bytes leave of half of the {available} bytes of available memory"
        else:
            num_pages = kv_cache_bytes // page_bytes
            given = f"a KV cache of {kv_cache_bytes} bytes"
            if num_pages * page_bytes + model_bytes > available:
                raise InvalidParameter(
                    f"{given} and the model's {model_bytes} bytes do not fit the {available} bytes of available "
                    f"memory; lower --kv-cache-gb to {max(0, available - model_bytes) / 1e9:.2f} or less"
                )
        num_pages = min(num_pages, MAX_NUM_PAGES)
        context_length = min(manifest.context_length, (num_pages - SPARE_PAGES) * PAGE_SIZE)
        wanted_context = min(manifest.context_length, MIN_CONTEXT_LENGTH)
        if context_length < wanted_context:
            needed = (num_pages_for(wanted_context) + SPARE_PAGES) * page_bytes
            raise InvalidParameter(
                f"{given} holds {max(0, context_length)} tokens of context; {needed} bytes are the least, "
                f"{full_context * page_bytes} hold the model's {manifest.context_length}; raise --kv-cache-gb"
            )
        return cls(num_pages, context_length)


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping, by the kernel's own estimate and the limit of the control
    group.
    """
    available = 1 << 30  # on a system that does not say
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _cached_file_bytes()))
    return available


def _cached_file_bytes() -> int:
    """What the control group's memory holds of files, weights that were just written among them: it makes room."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))


def _read_number(path: Path) -> int | None:
    """The number in a file; None if there is no file or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
