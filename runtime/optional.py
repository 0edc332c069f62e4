"""Extras: features under `runtime/extras` that everything else works without, each a folder that can be removed.

The only module of the core that names one. An extra is found by an option that belongs to it, in a module `extra` of
its folder. Two hooks connect it: it *offers* rows for a sequence to begin with, and *observes* steps and prompts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from .errors import ExtraNotInstalled

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from .artifact import Artifact
    from .artifact.model_config import ModelConfig
    from .cache.prefix_cache import PrefixCache
    from .model.batch import Runner
    from .prefix.disk_tier import DiskTier
    from .prefix.tier_hooks import TierExtra, TierStats
    from .store import PageStore
    from .store.single_records import RecordKinds

APPROXIMATE: Final = "approximate"
OPTIONS: Final = {"kv_budget": APPROXIMATE, "chunk_cache_bytes": APPROXIMATE}  # which extra an option belongs to


class OpenExtra(Protocol):
    """An extra of one engine."""

    def observe(self, runner: Runner) -> Runner:
        """Return a runner with the same results that also observes steps.

        Raises:
            InvalidParameter: this runner cannot be observed.
        """
        ...

    def tier_extra(
        self, cache: PrefixCache, runner: Runner, *, clock: Callable[[], float]
    ) -> Callable[[DiskTier], TierExtra]:
        """Return what makes the hooks of a tier under this cache; `runner` is what `observe` returned."""
        ...


class Extra(Protocol):
    """One folder of `runtime/extras`. Options are `EngineOptions` and `RequestOptions`.

    Attributes:
        speculates: whether replies are speculated on where it is in use.
    """

    speculates: bool

    def check(self, options: Any) -> None:
        """Raise InvalidParameter if its options of an engine do not go with others."""
        ...

    def check_request(self, asked: Any) -> None:
        """Raise InvalidParameter if its options of a request are outside their range."""
        ...

    def decide(self, options: Any, asked: Any, model: ModelConfig) -> Any:
        """Return what a request asks for, with the engine's choices where it makes none.

        Raises:
            InvalidParameter: the model or the engine does not allow it.
        """
        ...

    def open(self, artifact: Artifact, options: Any) -> OpenExtra:
        """Open it for an engine.

        Raises:
            InvalidParameter: the artifact does not allow it.
        """
        ...

    def reply_options(self, opened: OpenExtra | None) -> Mapping[str, object]:
        """Return what equal requests may have other replies by; None: it is not in use."""
        ...

    def record_kinds(self) -> RecordKinds:
        """Return the kinds of records that it keeps in stores."""
        ...

    def attach(self, store: PageStore) -> None:
        """Attach its records to a store that is opened for no engine."""
        ...

    def metrics(self, tier: TierStats) -> Iterator[Metric]:
        """Yield its metrics, zeros where it is not in use."""
        ...


def extra_of(*options: object) -> Extra | None:
    """Return the extra that an option is set of, in any of these values; None if none is.

    Raises:
        ExtraNotInstalled: its folder was removed.
    """
    for name, owner in OPTIONS.items():
        for each in options:
            if getattr(each, name, None) is not None:
                return required(owner, name)
    return None


def required(name: str, asked: str) -> Extra:
    """Return an extra, for `asked`, an option or a command.

    Raises:
        ExtraNotInstalled: its folder was removed.
    """
    if (extra := find(name)) is None:
        raise ExtraNotInstalled(
            f"{asked} needs the extra {name!r}, which is not installed; install a radixlm that has "
            f"runtime/extras/{name}",
            param=asked,
        )
    return extra


def record_kinds() -> RecordKinds:
    """Return the kinds of records of all extras that are there."""
    return {kind: about for extra in installed() for kind, about in extra.record_kinds().items()}


def installed() -> list[Extra]:
    """Return all extras that are there."""
    return [extra for name in dict.fromkeys(OPTIONS.values()) if (extra := find(name)) is not None]


@functools.cache
def find(name: str) -> Extra | None:
    """Return an extra; None if its folder was removed."""
    module = f"radixlm.runtime.extras.{name}.extra"
    try:
        extra: Extra = importlib.import_module(module).EXTRA
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        return None
    return extra
