"""Extras: optional features under `runtime/extras`, each a folder that can be removed.

Only this module of the core names an extra. It finds an extra by one of its options, in the module `extra` of its
folder. Two hooks connect it: it *offers* rows for a sequence to begin with, and *observes* steps and prompts.
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
OPTIONS: Final = {"kv_budget": APPROXIMATE, "chunk_cache_bytes": APPROXIMATE}  # the extra of each option


class OpenExtra(Protocol):
    """An extra that is open for one engine."""

    def observe(self, runner: Runner) -> Runner:
        """Return a runner with the same results that also observes steps.

        Raises:
            InvalidParameter: this runner cannot be observed.
        """
        ...

    def tier_extra(
        self, cache: PrefixCache, runner: Runner, *, clock: Callable[[], float]
    ) -> Callable[[DiskTier], TierExtra]:
        """Return the function that makes the hooks of a tier of this cache; `observe` returned the `runner`."""
        ...


class Extra(Protocol):
    """One folder of `runtime/extras`. Options are `EngineOptions` and `RequestOptions`.

    Attributes:
        speculates: whether replies use speculative decoding while the extra is in use.
    """

    speculates: bool

    def check_options(self, options: Any) -> None:
        """Raise InvalidParameter if its engine options are not compatible with others."""
        ...

    def check_request(self, asked: Any) -> None:
        """Raise InvalidParameter if its options of a request are outside their range."""
        ...

    def decide(self, options: Any, asked: Any, model: ModelConfig) -> Any:
        """Return a request's options for the extra, completed by the engine's.

        Raises:
            InvalidParameter: the model or the engine does not allow them.
        """
        ...

    def open(self, artifact: Artifact, options: Any) -> OpenExtra:
        """Open the extra for an engine.

        Raises:
            InvalidParameter: the artifact does not allow it.
        """
        ...

    def reply_options(self, opened: OpenExtra | None) -> Mapping[str, object]:
        """Return the options that can change replies; `opened` is None if the extra is not in use."""
        ...

    def record_kinds(self) -> RecordKinds:
        """Return the kinds of records that it keeps in stores."""
        ...

    def attach(self, store: PageStore) -> None:
        """Attach its records to a store that is opened for no engine."""
        ...

    def metrics(self, tier: TierStats) -> Iterator[Metric]:
        """Yield its metrics, zeros if it is not in use."""
        ...


def extra_of(*options: object) -> Extra | None:
    """Return the extra whose options are set in any of these values; None if none is.

    Raises:
        ExtraNotInstalled: its folder was removed.
    """
    for name, owner in OPTIONS.items():
        for each in options:
            if getattr(each, name, None) is not None:
                return required(owner, name)
    return None


def required(name: str, asked: str) -> Extra:
    """Return an extra that `asked`, an option or a command, needs.

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
    """Return the kinds of records of all installed extras."""
    return {kind: about for extra in installed() for kind, about in extra.record_kinds().items()}


def installed() -> list[Extra]:
    """Return all installed extras."""
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
