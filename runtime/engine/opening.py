"""Open the parts of an engine: the model, the pages in memory, the store on disk, a log.

Knows in which order parts are opened, and that they are closed again; not requests, prompts or steps.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from ..artifact import Artifact
from ..artifact.find_artifact import find_artifact
from ..artifact.manifest import Manifest
from ..artifact.window_layers import WindowLayers
from ..cache.cache_namespace import CacheNamespaces, ModelIdentity
from ..cache.page_pool import PagePool
from ..cache.prefix_cache import PrefixCache
from ..cache.window_rows import WindowMemory, WindowRows
from ..chat.artifact_tokenizer import open_tokenizer
from ..errors import InvalidParameter, StoreUnusable
from ..kv_log.log import KVLog
from ..lora.adapters import Adapters
from ..memory import Memories
from ..model.batch import Drafting, PageIO, Runner, StateIO
from ..model.memory import AdapterRows, can_release_memory
from ..optional import OpenExtra, installed
from ..prefix.disk_tier import DiskTier
from ..prefix.expected_prompts import ExpectedPrompts
from ..prefix.prefill_measure import StoredPrefill, measure_prefill
from ..prefix.small_record_saver import known_calls
from ..speculation.draft_model import DraftModel, DraftModelInfo
from ..speculation.mtp_head import MTPHead
from ..speculation.same_tokens import require_same_tokens
from ..states.state_pool import StatePool
from ..store import PageStore, StoreIdentity
from ..system import available_memory_bytes
from .background_work import CacheExpiry, work_when_quiet
from .engine_core import EngineCore
from .engine_loop import EngineLoop
from .engine_options import EngineOptions
from .engine_queue import WorkQueue
from .kv_cache_size import KVCacheSize
from .prompts import Prompts
from .request_options import RequestLimits

_LOGGER = logging.getLogger(__name__)


class Opened(NamedTuple):
    """The parts of an engine. When the loop ends, pending writes to the store finish, and all but prompts is freed."""

    prompts: Prompts
    core: EngineCore
    loop: EngineLoop
    namespaces: CacheNamespaces
    context_notice: str | None  # why the context is shorter than the model's, unless that was requested
    reply_options: Mapping[str, object]  # current values of the options that can change replies
    memory_bytes: int  # of weights, KV cache and states, a draft model included
    adapters: Adapters


def open_parts(artifact: Artifact, options: EngineOptions) -> Opened:
    """Open the parts of an engine for an artifact, and start its thread.

    Raises:
        ArtifactError: the artifact cannot be run.
        InvalidParameter: the artifact, the runner or the memory does not allow an option; or there is a store and the
            runner cannot copy pages.
        StoreError: the store cannot be used, or another process uses it. If only its disk does not allow it, the
            engine opens without it.
    """
    manifest, clock, store = artifact.manifest, options.clock, options.store
    extra = None if options.extra is None else options.extra.open(artifact, options)
    policy = options.scheduler_policy(manifest)
    taken_already = manifest.module.weights_bytes if artifact.is_in_memory else 0
    available = available_memory_bytes() + taken_already
    if options.memory_bytes is not None:
        available = min(available, options.memory_bytes)
    if manifest.lora:
        available = max(0, available - len(options.loras or {}) * manifest.lora.adapter_bytes)
    size = KVCacheSize.choose(
        manifest,
        available_bytes=available,
        kv_cache_bytes=options.kv_cache_bytes,
        max_num_seqs=options.max_num_seqs,
        context_length=options.context_length,
        state_cache_bytes=options.state_cache_bytes,
        window_layers=_layers_with_droppable_rows(manifest, options),
    )
    if size.notice is not None:
        _LOGGER.warning("%s", size.notice)
    queue = WorkQueue(clock=clock)
    tier: DiskTier | None = None
    measuring: Iterator[None] | None = None
    with ExitStack() as opened:  # parts that are open are closed again if another cannot be opened
        if isinstance(store, PageStore):
            opened.callback(store.close)
        log = None if options.kv_log is None else KVLog.open(options.kv_log, options.kv_log_bytes)
        if log is not None:
            opened.callback(log.close)
        store_off_because: str | None = None
        if isinstance(store, str | Path):
            try:
                store = PageStore.open(store, StoreIdentity.of(manifest), max_bytes=options.store_bytes)
                opened.callback(store.close)
            except StoreUnusable as error:
                _LOGGER.error("no prefix is kept on disk: %s", error)
                store, store_off_because = None, str(error)
        runner = (
            _open_recurrent_runner(artifact, size, options)
            if size.num_state_slots
            else _open_runner(artifact, size.num_pages, options, drops_rows=size.num_window_pages is not None)
        )
        opened.callback(runner.close)
        rows: AdapterRows | None = getattr(runner, "adapters", None)
        adapters = Adapters(options.loras or {}, rows)
        windows = _open_windows(runner, manifest, size)
        if extra is not None:
            runner = extra.observe(runner)
        memories = Memories()
        opened.callback(memories.shut_down)
        # after the runner, which maps the weights in at the same time
        prompts = Prompts(
            artifact, clock=clock, strip_suffix=options.strip_suffix, template_kwargs=options.template_kwargs
        )
        memories.add(prompts.texts)
        draft_model: DraftModel | None = None
        if options.draft is not None:
            draft_model = memories.add(_open_draft(options, manifest, size, prompts, available))
        vector_size = None if manifest.writes_text else manifest.model.num_outputs
        limits = RequestLimits(prompts.vocab_size, size.context_length, vector_size)
        states: StatePool | None = None
        if size.num_state_slots:
            special_ids = prompts.tokenizer.profile.special_ids
            states = StatePool(size.num_state_slots, special_ids=special_ids, is_stored=store is not None)
        cache = memories.add(PrefixCache(PagePool(size.num_pages, windows), states=states, clock=clock, kv_log=log))
        if store is not None:
            tier = memories.add(
                DiskTier(
                    store,
                    cache,
                    _require_page_io(runner),
                    queue,
                    clock=clock,
                    make_extra=None if extra is None else extra.tier_extra(cache, runner, clock=clock),
                    states=None if states is None else _require_state_io(runner),
                )
            )
            for namespace, call in known_calls(store):
                prompts.call_history.note(namespace, call)
            known = StoredPrefill.of(
                store.directory, store.identity, num_threads=options.num_threads, is_scored=extra is not None
            )
            if not known.load(tier.rates):
                sizes = {"context_length": size.context_length, "max_num_tokens": policy.max_num_batched_tokens}
                measures = measure_prefill(runner, cache, tier.rates, **sizes, clock=clock)
                measuring = _keep_measured(measures, tier, known)
        expected: ExpectedPrompts | None = None
        if options.idle_work:
            aside = ThreadPoolExecutor(1, thread_name_prefix="radixlm-expected")
            opened.callback(aside.shutdown, cancel_futures=True)
            expected = memories.add(
                ExpectedPrompts(
                    runner,
                    cache,
                    context_length=size.context_length,
                    max_num_tokens=policy.max_num_batched_tokens,
                    clock=clock,
                    aside=aside.submit,
                    post=queue.post,
                )
            )
        mtp_head: MTPHead | None = None
        if options.uses_mtp(manifest.model):
            mtp_head = MTPHead(_require_drafting(runner), cache.pool, vocab_size=prompts.vocab_size, clock=clock)
        core = EngineCore(
            runner,
            cache,
            memories,
            limits,
            policy=policy,
            clock=clock,
            tier=tier,
            queue=queue,
            expected=expected,
            draft_model=draft_model,
            mtp_head=mtp_head,
            store_off_because=store_off_because,
        )
        if options.cache_ttl_s is not None:
            expiry = CacheExpiry(options.cache_ttl_s, clock=clock, drop=memories.drop_unused)
            queue.post(lambda: expiry.keep_up(queue))
        namespaces = CacheNamespaces(ModelIdentity.of(manifest), None if store is None else store.secret)
        close = opened.pop_all().close
    loop = EngineLoop(core, clock=clock, on_exit=close, max_num_requests=options.max_num_requests)
    if measuring is not None:
        work_when_quiet(queue, measuring, quiet_s=lambda: loop.queue.quiet_s, clock=clock)
    memory_bytes = size.memory_bytes(manifest)
    if manifest.lora:
        memory_bytes += len(adapters.digests) * manifest.lora.adapter_bytes
    if draft_model is not None and (about := draft_model.stats().about) is not None:
        memory_bytes += about.weights_bytes + about.kv_bytes
    reply_options = _reply_options(options, size, extra)
    return Opened(prompts, core, loop, namespaces, size.notice, reply_options, memory_bytes, adapters)


def _reply_options(options: EngineOptions, size: KVCacheSize, opened: OpenExtra | None) -> Mapping[str, object]:
    """Return all options that change replies, as JSON values: batching, speculation and storage do not."""
    of_extras = [extra.reply_options(opened) for extra in installed()]
    return {
        "strip_suffix": options.strip_suffix,
        "template_kwargs": options.template_kwargs or {},
        "context_length": size.context_length,  # where replies end that have no max_tokens
        **{name: value for of_extra in of_extras for name, value in of_extra.items()},
    }


def _keep_measured(measures: Generator[None, None, bool], tier: DiskTier, known: StoredPrefill) -> Iterator[None]:
    """Measure the cost of prefill step by step, and save it for the next start; nothing if nothing is on disk."""
    if tier.stats().num_pages and (yield from measures):
        known.save(tier.rates)  # now: short requests tell the rates nothing about high positions


def _open_draft(
    options: EngineOptions, manifest: Manifest, size: KVCacheSize, prompts: Prompts, available_bytes: int
) -> DraftModel:
    """Open the draft model.

    Raises:
        ArtifactError: it cannot be run.
        InvalidParameter: its vocabulary differs, or there is no memory for it.
    """
    draft = options.draft if isinstance(options.draft, Artifact) else Artifact.open(find_artifact(options.draft or ""))
    if not draft.manifest.writes_text:
        raise InvalidParameter(f"the draft {draft.manifest.name} writes no text; choose a draft that generates text")
    if draft.manifest.model.state_bytes:
        raise InvalidParameter(f"the draft {draft.manifest.name} keeps recurrent states; choose a draft without them")
    own = open_tokenizer(draft, None, options.clock)
    names, num_known = (manifest.name, draft.manifest.name), draft.manifest.model.vocab_size
    require_same_tokens(names[0], prompts.tokenizer, names[1], own, num_tokens=prompts.vocab_size, num_known=num_known)
    pages = KVCacheSize.of_draft(draft.manifest, model=manifest, size=size, available_bytes=available_bytes)
    runner = _open_runner(draft, pages.num_pages, options)
    return DraftModel(
        runner,
        PrefixCache(PagePool(pages.num_pages), clock=options.clock),
        context_length=pages.context_length,
        vocab_size=prompts.vocab_size,
        clock=options.clock,
        about=DraftModelInfo(
            draft.manifest.name,
            weights_bytes=draft.manifest.module.weights_bytes,
            kv_bytes=pages.num_pages * draft.manifest.kv.page_bytes,
        ),
    )


def _layers_with_droppable_rows(manifest: Manifest, options: EngineOptions) -> WindowLayers | None:
    """Return the layers with a sliding window, if the runner and the system can release their memory."""
    if options.open_runner is not None or manifest.model.is_bidirectional or not can_release_memory():
        return None
    return WindowLayers.of(manifest.model, manifest.kv)


def _open_windows(runner: Runner, manifest: Manifest, size: KVCacheSize) -> WindowRows | None:
    """Return the owner of KV rows in layers with sliding windows; None if pages keep all their rows."""
    layers = WindowLayers.of(manifest.model, manifest.kv)
    if size.num_window_pages is None or layers is None or not isinstance(runner, WindowMemory):
        return None
    return WindowRows(layers.window, size.num_window_pages, runner)


def _open_runner(artifact: Artifact, num_pages: int, options: EngineOptions, *, drops_rows: bool = False) -> Runner:
    """Open the runner of a model with KV pages, by the option `open_runner` if there is one.

    `drops_rows` lets it release memory of KV rows that sliding windows have left.
    """
    if options.open_runner is not None:
        return options.open_runner(artifact, num_pages, options.num_threads)
    from ..model.model_runner import ModelRunner  # loads the native runtime, which other runners do not need

    keep_scores = options.extra is not None  # for the extra
    return ModelRunner(
        artifact,
        num_pages=num_pages,
        num_threads=options.num_threads,
        keep_scores=keep_scores,
        drops_rows=drops_rows,
    )


def _open_recurrent_runner(artifact: Artifact, size: KVCacheSize, options: EngineOptions) -> Runner:
    """Open the runner of a model with recurrent states, by the option `open_runner` if there is one."""
    if options.open_runner is not None:
        return options.open_runner(artifact, size.num_pages, options.num_threads)
    from ..model.model_runner import ModelRunner

    pages, slots = size.num_pages, size.num_state_slots
    return ModelRunner(artifact, num_pages=pages, num_threads=options.num_threads, num_state_slots=slots)


def _require_state_io(runner: Runner) -> StateIO:
    """Return the runner's interface to read and write recurrent states, which a store on disk needs.

    Raises:
        InvalidParameter: it has none.
    """
    states = getattr(runner, "states", None)
    if not isinstance(states, StateIO):
        raise InvalidParameter(f"{type(runner).__name__} cannot copy states, which a store needs; open without one")
    return states


def _require_drafting(runner: Runner) -> Drafting:
    """Return the runner as one that drafts with the model's MTP head.

    Raises:
        InvalidParameter: it cannot.
    """
    if not isinstance(runner, Drafting):
        raise InvalidParameter(f"{type(runner).__name__} computes no MTP head; open with speculate 'lookup'")
    return runner


def _require_page_io(runner: Runner) -> PageIO:
    """Return the runner as one that reads and writes KV pages, which a store on disk needs.

    Raises:
        InvalidParameter: it cannot.
    """
    if not isinstance(runner, PageIO):
        raise InvalidParameter(f"{type(runner).__name__} cannot copy pages, which a store needs; open without one")
    return runner
