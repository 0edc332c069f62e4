"""Approximate KV loading as an extra: the options `kv_budget` and `chunk_cache_bytes`, and the parts that they open.

Knows options and the order in which parts are made. Large modules are imported when an engine is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...errors import InvalidParameter

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from ...artifact import Artifact
    from ...artifact.model_config import ModelConfig
    from ...cache.prefix_cache import PrefixCache
    from ...engine.engine_options import EngineOptions
    from ...engine.request_options import RequestOptions
    from ...model.batch import Runner
    from ...optional import OpenExtra
    from ...prefix.disk_tier import DiskTier
    from ...prefix.tier_hooks import TierExtra, TierStats
    from ...store import PageStore
    from ...store.single_records import RecordKinds
    from .calibration.calibration import Calibration


@dataclass(frozen=True)
class OpenApproximate:
    """Approximate loading for one engine; see `OpenExtra`."""

    artifact: Artifact
    options: EngineOptions
    calibration: Calibration

    def observe(self, runner: Runner) -> Runner:
        """Return a wrapper of the runner that also records the attention to each KV row."""
        from .approximate_tier import score

        return score(runner)

    def tier_extra(
        self, cache: PrefixCache, runner: Runner, *, clock: Callable[[], float]
    ) -> Callable[[DiskTier], TierExtra]:
        """Return a factory of the hooks for a tier of this cache."""
        from .approximate_tier import choose_rows
        from .attention_scores import ScoredRunner

        assert isinstance(runner, ScoredRunner), "it was not observed"
        num_bytes = self.options.chunk_cache_bytes
        return choose_rows(self.artifact.manifest, self.calibration, cache, runner, num_bytes, clock=clock)


class Approximate:
    """The extra for approximate KV loading; see `Extra`. Drafts need whole prefixes, so replies are not speculated."""

    speculates = False

    def check_options(self, options: EngineOptions) -> None:
        """Raise InvalidParameter if `kv_budget` is given with a draft model or with `speculate="lookup"`."""
        if options.kv_budget is not None and (options.draft is not None or options.speculate == "lookup"):
            one = "draft" if options.draft is not None else "speculate"
            raise InvalidParameter(f"{one} is given, and drafts need whole prefixes; leave it out, or kv_budget")

    def check_request(self, asked: RequestOptions) -> None:
        """Raise InvalidParameter if the request's `kv_budget` is out of range."""
        if asked.kv_budget is not None:
            _require_share(asked.kv_budget)

    def check_model(self, kv_budget: float, model: ModelConfig) -> None:
        """Raise InvalidParameter if the model needs all of its KV."""
        if (why := model.why_not_partial) is not None:
            raise InvalidParameter(
                f"kv_budget is {kv_budget}, and this model needs all of its keys and values: {why}; leave kv_budget "
                f"out",
                param="kv_budget",
            )

    def decide(self, options: EngineOptions, asked: RequestOptions, model: ModelConfig) -> RequestOptions:
        """Return the request's options, with the engine's `kv_budget` if it has none.

        Raises:
            InvalidParameter: the budget is below 1, and the model needs all of its KV, or the engine has no budget.
        """
        kv_budget = options.kv_budget if asked.kv_budget is None else asked.kv_budget
        if options.kv_budget is None and kv_budget is not None and kv_budget < 1:
            self.check_model(kv_budget, model)
            raise InvalidParameter(
                f"kv_budget is {kv_budget}, and all of a prefix is loaded here; leave it out, or open the engine with "
                f"a kv_budget (radixlm serve --kv-budget)",
                param="kv_budget",
            )
        return asked.changed(kv_budget=kv_budget)

    def open(self, artifact: Artifact, options: EngineOptions) -> OpenApproximate:
        """Open approximate loading for an engine.

        Raises:
            InvalidParameter: the model needs all of its KV, or the artifact was not calibrated.
        """
        from .calibration.calibration import Calibration

        assert options.kv_budget is not None, "it was checked"
        self.check_model(options.kv_budget, artifact.manifest.model)
        return OpenApproximate(artifact, options, Calibration.read(artifact.path, artifact.manifest))

    def reply_options(self, opened: OpenExtra | None) -> Mapping[str, object]:
        """Return the engine's `kv_budget` and the digest of its `calibration`, each None if the extra is not in use."""
        if not isinstance(opened, OpenApproximate):
            return {"kv_budget": None, "calibration": None}
        return {"kv_budget": opened.options.kv_budget, "calibration": opened.calibration.digest}

    def record_kinds(self) -> RecordKinds:
        """Return the kinds of records: rows by importance, and scores of rows."""
        from .records.row_records import KINDS

        return KINDS

    def attach(self, store: PageStore) -> None:
        """Attach the record kinds to a store."""
        from .records.row_records import RowRecords

        RowRecords.of(store)

    def metrics(self, tier: TierStats) -> Iterator[Metric]:
        """Yield the metrics of partly loaded prefixes."""
        from .metrics import part_metrics

        return part_metrics(tier.extra)


def _require_share(kv_budget: float) -> None:
    """Raise InvalidParameter unless the budget is above 0 and at most 1."""
    if not 0 < kv_budget <= 1:  # which NaN is not
        raise InvalidParameter(f"kv_budget is {kv_budget}; it must be above 0 and at most 1", param="kv_budget")


EXTRA: Final = Approximate()
