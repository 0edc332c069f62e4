"""Open what an engine works with: the model, the pages in memory, the store on disk, a log.

Knows who opens what, and that it is closed again; not requests, prompts or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..artifact import Artifact
from ..artifact.manifest import Manifest
from ..cache.page_pool import PagePool
from ..cache.prefix_cache import PrefixCache
from ..errors import InvalidParameter
from ..kv_log.log import KVLog
from ..model.batch import PageIO, Runner
from ..prefix.disk_tier import DiskTier
from ..prefix.prefill_measure import measure_prefill
from ..prefix.stored_prefill import StoredPrefill
from ..pruning.probe_forward import ProbeForward
from ..pruning.pruning import Pruning
from ..pruning.scored_runner import ScoredRunner, ScoringRunner
from ..store import PageStore, StoreIdentity
from .work_queue import WorkQueue

MAX_THREADS = 1024  # far above it the thread pool aborts the process


OpenRunner = Callable[["Artifact", int, int | None], Runner]
"""Makes a runner of an artifact, with a number of KV pages and of threads."""


@dataclass(frozen=True)
class EngineParts:
    """A model and its cache, in memory and, with a `tier`, on disk; `close` frees them all."""

    runner: Runner
    cache: PrefixCache
    tier: DiskTier | None
    log: KVLog | None
    secret: bytes | None  # that the store keeps for names of namespaces; None without a store
    unmeasured: StoredPrefill | None  # where to keep what computing costs; None: it is known, or there is no store

    @classmethod
    def open(
        cls,
        artifact: Artifact,
        num_pages: int,
        *,
        num_threads: int | None,
        store: str | Path | PageStore | None,
        store_bytes: int,
        is_scored: bool,
        open_runner: OpenRunner | None,
        kv_log: str | Path | None,
        kv_log_bytes: int | None,
        clock: Callable[[], float],
        queue: WorkQueue,
    ) -> EngineParts:
        """Open the parts of an engine with `num_pages` KV pages; the other arguments are `Engine`'s own.

        Raises:
            ArtifactError: the artifact cannot be run.
            InvalidParameter: `num_threads` is outside its range, or there is a store and the runner cannot copy pages,
                or scores are kept without a store, or the runner cannot score.
            StoreError: the store cannot be used, or another process uses it.
        """
        if num_threads is not None and not 1 <= num_threads <= MAX_THREADS:
            raise InvalidParameter(f"num_threads is {num_threads}; it must be 1 to {MAX_THREADS}, or None")
        if is_scored and store is None:
            raise InvalidParameter("kv_budget is of what a store keeps; give a store, or leave it out")
        with ExitStack() as opened:  # what is, is closed again if something else cannot be
            if isinstance(store, PageStore):
                opened.callback(store.close)
            log = None if kv_log is None else KVLog.open(kv_log, kv_log_bytes)
            if log is not None:
                opened.callback(log.close)
            if isinstance(store, str | Path):
                store = PageStore.open(store, StoreIdentity.of(artifact.manifest), max_bytes=store_bytes)
                opened.callback(store.close)
            if open_runner is None:
                runner = _open_model_runner(artifact, num_pages, num_threads, keep_scores=is_scored)
            else:
                runner = open_runner(artifact, num_pages, num_threads)
            opened.callback(runner.close)
            cache = PrefixCache(PagePool(num_pages), clock=clock, kv_log=log)
            scored = ScoredRunner(_scoring(runner)) if is_scored else None
            tier = unmeasured = None
            if store is not None:
                stored = StoredPrefill.of(store.directory, store.identity, num_threads=num_threads, is_scored=is_scored)
                tier = DiskTier(
                    store,
                    cache,
                    _page_io(scored or runner),
                    queue,
                    clock=clock,
                    choose_rows=None if scored is None else _choose_rows(artifact.manifest, cache, scored, clock),
                )
                unmeasured = None if stored.load(tier.rates) else stored
            opened.pop_all()
        return cls(scored or runner, cache, tier, log, None if store is None else store.secret, unmeasured)

    def measure_prefill(
        self, *, context_length: int, max_num_tokens: int, clock: Callable[[], float]
    ) -> Iterator[None] | None:
        """Measure what computing costs, step by step, and keep that for the next start; None where it is known, or
        nothing is on disk to be weighed against it.
        """
        if self.tier is None or self.unmeasured is None:
            return None
        tier, unmeasured = self.tier, self.unmeasured
        sizes = {"context_length": context_length, "max_num_tokens": max_num_tokens}

        def measure() -> Iterator[None]:
            if not tier.stats().num_pages:
                return
            if (yield from measure_prefill(self.runner, self.cache, tier.rates, **sizes, clock=clock)):
                unmeasured.save(tier.rates)  # now: short requests teach the rates nothing of far tokens

        return measure()

    def drop_unused(self, since: float) -> None:
        """Forget the prefixes that nobody used since then, on the clock of the cache."""
        self.cache.drop_unused(since)
        if self.tier is not None:
            self.tier.drop_unused(since)

    def close(self) -> None:
        """Write to the store what waits for it, and free everything."""
        for part in (self.tier, self.runner, self.log):
            if part is not None:
                part.close()


def _page_io(runner: Runner) -> PageIO:
    if not isinstance(runner, PageIO):
        raise InvalidParameter(f"{type(runner).__name__} cannot copy pages, which a store needs; open without one")
    return runner


def _choose_rows(
    manifest: Manifest, cache: PrefixCache, runner: ScoredRunner, clock: Callable[[], float]
) -> Callable[[DiskTier], Pruning]:
    group_size = manifest.model.num_attention_heads // manifest.kv.num_kv_heads
    probe = ProbeForward(cache, runner, max_num_tokens=manifest.module.max_num_tokens, group_size=group_size)
    return lambda tier: Pruning(tier, runner.scores, probe, clock=clock)


def _scoring(runner: Runner) -> ScoringRunner:
    if not isinstance(runner, ScoringRunner):
        raise InvalidParameter(f"{type(runner).__name__} cannot score, which a kv_budget needs; open without it")
    return runner


def _open_model_runner(artifact: Artifact, num_pages: int, num_threads: int | None, *, keep_scores: bool) -> Runner:
    from ..model.model_runner import ModelRunner  # loads the native runtime, which other runners do without

    return ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads, keep_scores=keep_scores)
