"""Choose the number of KV pages and state slots to allocate: as requested, or a share of the available memory.

Knows bytes, pages and slots. Nothing is allocated here.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE, Manifest
from ..artifact.window_layers import WindowLayers
from ..cache.page_pool import num_pages_for
from ..cache.window_rows import num_window_pages
from ..errors import InvalidParameter
from ..system import available_memory_bytes

MIN_CONTEXT_LENGTH = 128  # tokens; a smaller cache is useless
MAX_NUM_PAGES = 2**31 // PAGE_SIZE - 1  # a slot is an int32
MIN_STATE_SLOTS = 4  # zeros; one read and one written in a step; a snapshot
MAX_STATE_SLOTS = 65_536
DEFAULT_STATE_BYTES = 1 << 30
SPARE_PAGES = 1  # for a partly reused page, whose rows exist twice for a moment
WINDOW_SHARE = 4  # one in this many pages has rows in layers with windows
WINDOW_SEQS = 8  # at least this many sequences are computed at a time, or `max_num_seqs` if fewer


@dataclass(frozen=True)
class KVCacheSize:
    """The number of pages to allocate, the context length that they hold, and slots for a recurrent model's states.

    Of a model with sliding windows, at most `num_window_pages` pages have rows in the layers with windows; None: all.
    `notice` is a warning for the user: the pages hold less than the model's context, although that was not requested.
    """

    num_pages: int
    context_length: int  # tokens of prompt and reply together
    notice: str | None = field(default=None, compare=False)
    num_state_slots: int = 0
    num_window_pages: int | None = None

    @classmethod
    def choose(
        cls,
        manifest: Manifest,
        *,
        kv_cache_bytes: int | None,
        max_num_seqs: int,
        context_length: int | None = None,
        available_bytes: int | None = None,
        state_cache_bytes: int | None = None,
        window_layers: WindowLayers | None = None,
    ) -> KVCacheSize:
        """Choose the size of the KV cache.

        Pages take `kv_cache_bytes`, by default a quarter of `available_bytes` (the system's if None). They hold
        `context_length` tokens, by default as much of the model's context as fits.
        The default is at most what `max_num_seqs` full contexts fill and what weights and workspace leave, and at
        least one full context if half of the available memory holds that. States of a recurrent model take
        `state_cache_bytes`, by default an eighth of `available_bytes` and at most 1 GiB. If the pages hold less than
        `max_num_seqs` full contexts, only some of them have rows in `window_layers`, and there are more pages.

        Raises:
            InvalidParameter: the states are too few, or requested for a model without states; the pages hold less than
                `context_length`, `MIN_CONTEXT_LENGTH` tokens, or the model's context if that is shorter; or they do not
                fit the available memory with weights and workspace; or `context_length` is longer than the model's.
        """
        least = min(manifest.context_length, MIN_CONTEXT_LENGTH)
        full = manifest.context_length if context_length is None else context_length
        if not isinstance(full, int) or not least <= full <= manifest.context_length:
            raise InvalidParameter(
                f"context_length is {full!r}; this artifact allows {least} to {manifest.context_length}"
            )
        page_bytes = manifest.kv.page_bytes
        available = available_memory_bytes() if available_bytes is None else available_bytes
        num_slots = _state_slots(manifest, available, state_cache_bytes)
        available = max(0, available - num_slots * manifest.model.state_bytes)
        full_bytes = _bytes_of(manifest, window_layers, num_pages_for(full) + SPARE_PAGES, max_num_seqs)
        if kv_cache_bytes is None:
            num_pages, given = _default_pages(manifest, available, max_num_seqs=max_num_seqs, context_length=full)
        else:
            num_pages, given = _asked_pages(manifest, available, kv_cache_bytes)
        num_windows: int | None = None
        if window_layers is not None and num_pages < max_num_seqs * num_pages_for(full) + SPARE_PAGES:
            num_bytes = num_pages * page_bytes
            num_pages, num_windows = _with_windows(manifest, window_layers, num_bytes, full, max_num_seqs)
        num_pages = min(num_pages, MAX_NUM_PAGES)
        held = min(full, (num_pages - SPARE_PAGES) * PAGE_SIZE)
        if held < least:
            needed = _bytes_of(manifest, window_layers, num_pages_for(least) + SPARE_PAGES, max_num_seqs)
            raise InvalidParameter(
                f"{given} holds {max(0, held)} tokens of context; {needed} bytes are the least, "
                f"{full_bytes} hold {full}; raise kv_cache_bytes (--kv-cache-gb)"
            )
        if held == full:
            return cls(num_pages, full, num_state_slots=num_slots, num_window_pages=num_windows)
        holds = f"{given} holds {held} tokens of the model's context of {manifest.context_length}"
        would_do = f"raise --kv-cache-gb to {math.ceil(full_bytes / 1e7) / 100:g}"
        if context_length is not None:
            raise InvalidParameter(
                f"{holds}, and {full} are asked for; {would_do}, or lower --context-length to {held}"
            )
        notice = f"{holds}; {would_do}, or serve with --context-length {held} if that is meant"
        return cls(num_pages, held, notice, num_slots, num_windows)

    @classmethod
    def of_draft(
        cls, manifest: Manifest, *, model: Manifest, size: KVCacheSize, available_bytes: int | None = None
    ) -> KVCacheSize:
        """Choose the size of a draft model's KV cache, given the `size` of the `model` that it drafts for.

        As many tokens, in at most a quarter of its bytes, or what holds `MIN_CONTEXT_LENGTH` tokens.

        Raises:
            InvalidParameter: they and both models' weights do not fit the available memory.
        """
        page_bytes = manifest.kv.page_bytes
        kv_bytes = size.kv_bytes(model)
        quarter = kv_bytes // 4 // page_bytes
        num_pages = min(size.num_pages, max(quarter, num_pages_for(MIN_CONTEXT_LENGTH) + SPARE_PAGES), MAX_NUM_PAGES)
        available = available_memory_bytes() if available_bytes is None else available_bytes
        taken = kv_bytes + _model_bytes(model)
        needed = num_pages * page_bytes + _model_bytes(manifest)
        if taken + needed > available:
            raise InvalidParameter(
                f"the draft's {needed} bytes and the model's {taken} do not fit the {available} bytes of available "
                f"memory; lower --kv-cache-gb, or leave the draft out"
            )
        return cls(num_pages, min(manifest.context_length, size.context_length, (num_pages - SPARE_PAGES) * PAGE_SIZE))

    def kv_bytes(self, manifest: Manifest) -> int:
        """Return the bytes of the pages."""
        num_bytes = self.num_pages * manifest.kv.page_bytes
        if self.num_window_pages is not None and (layers := WindowLayers.of(manifest.model, manifest.kv)) is not None:
            num_bytes -= self.num_pages * layers.page_bytes - self.num_window_pages * _window_page_bytes(layers)
        return num_bytes

    def memory_bytes(self, manifest: Manifest) -> int:
        """Return the bytes of weights, workspace, pages and states."""
        return _model_bytes(manifest) + self.kv_bytes(manifest) + self.num_state_slots * manifest.model.state_bytes


def _default_pages(manifest: Manifest, available: int, *, max_num_seqs: int, context_length: int) -> tuple[int, str]:
    """Return the default number of pages, and a text that names the memory that they are part of."""
    page_bytes, model_bytes = manifest.kv.page_bytes, _model_bytes(manifest)
    num_pages_each = num_pages_for(context_length)
    quarter, half = available // 4 // page_bytes, available // 2 // page_bytes
    wanted = max_num_seqs * num_pages_each + SPARE_PAGES
    most = max(0, available - model_bytes) // page_bytes
    num_pages = min(wanted, most, max(quarter, min(num_pages_each + SPARE_PAGES, half)))
    return num_pages, f"what the model's {model_bytes} bytes leave of half of the {available} bytes of available memory"


def _asked_pages(manifest: Manifest, available: int, kv_cache_bytes: int) -> tuple[int, str]:
    """Return the requested number of pages, and a text that names the KV cache.

    Raises:
        InvalidParameter: they do not fit the memory.
    """
    page_bytes, model_bytes, given = (
        manifest.kv.page_bytes,
        _model_bytes(manifest),
        f"a KV cache of {kv_cache_bytes} bytes",
    )
    num_pages = kv_cache_bytes // page_bytes
    if num_pages * page_bytes + model_bytes > available:
        raise InvalidParameter(
            f"{given} and the model's {model_bytes} bytes do not fit the {available} bytes of available "
            f"memory; lower --kv-cache-gb to {max(0, available - model_bytes) / 1e9:.2f} or less"
        )
    return num_pages, given


def _with_windows(
    manifest: Manifest, layers: WindowLayers, num_bytes: int, context_length: int, max_num_seqs: int
) -> tuple[int, int | None]:
    """Return how many pages fit if only some have rows in layers with windows, and how many these are.

    If that is not more than full pages, return the number of full pages and None.
    """
    num_whole = num_bytes // manifest.kv.page_bytes
    full_bytes, window_bytes = manifest.kv.page_bytes - layers.page_bytes, _window_page_bytes(layers)
    num_pages = min(
        max_num_seqs * num_pages_for(context_length) + SPARE_PAGES,
        num_bytes * WINDOW_SHARE // (full_bytes * WINDOW_SHARE + window_bytes),
        max(0, num_bytes - _least_windows(manifest, layers, max_num_seqs) * window_bytes) // max(1, full_bytes),
    )
    if num_pages <= num_whole:
        return num_whole, None
    return num_pages, (num_bytes - num_pages * full_bytes) // window_bytes


def _bytes_of(manifest: Manifest, layers: WindowLayers | None, num_pages: int, max_num_seqs: int) -> int:
    """Return the bytes of this many pages, with rows in layers with windows for as few of them as possible."""
    num_bytes = num_pages * manifest.kv.page_bytes
    if layers is None:
        return num_bytes
    num_windows = max(-(-num_pages // WINDOW_SHARE), _least_windows(manifest, layers, max_num_seqs))
    some = num_pages * (manifest.kv.page_bytes - layers.page_bytes) + num_windows * _window_page_bytes(layers)
    return min(num_bytes, some)


def _least_windows(manifest: Manifest, layers: WindowLayers, max_num_seqs: int) -> int:
    """Return the number of pages of a few sequences that a step reads or writes in layers with windows."""
    return num_window_pages(layers.window, min(max_num_seqs, WINDOW_SEQS), manifest.module.max_num_tokens)


def _window_page_bytes(layers: WindowLayers) -> int:
    """Return the bytes of a page's rows in layers with windows.

    The rows of each layer are stored apart, and fill pages of the operating system only partly at either end of a run.
    """
    return layers.page_bytes + len(layers.parts) * mmap.PAGESIZE


def _state_slots(manifest: Manifest, available: int, state_cache_bytes: int | None) -> int:
    """Return the number of slots for states, the slot of zeros included; 0 if the model has no states.

    Raises:
        InvalidParameter: `state_cache_bytes` holds too few, or is not for this model.
    """
    state_bytes = manifest.model.state_bytes
    if not state_bytes:
        if state_cache_bytes is not None:
            raise InvalidParameter(
                f"state_cache_bytes is {state_cache_bytes}, and {manifest.name} keeps no states; leave it out"
            )
        return 0
    asked = min(DEFAULT_STATE_BYTES, available // 8) if state_cache_bytes is None else state_cache_bytes
    num_slots = 1 + asked // state_bytes
    if num_slots < MIN_STATE_SLOTS and state_cache_bytes is not None:
        raise InvalidParameter(
            f"state_cache_bytes is {state_cache_bytes}, and {manifest.name} needs {MIN_STATE_SLOTS - 1} states of "
            f"{state_bytes} bytes at least; raise --state-cache-gb"
        )
    return min(max(num_slots, MIN_STATE_SLOTS), MAX_STATE_SLOTS)


def _model_bytes(manifest: Manifest) -> int:
    return manifest.module.weights_bytes + manifest.module.workspace_bytes
