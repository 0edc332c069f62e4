"""How an engine is opened: one value from the command line down to what it opens.

Knows ranges; what an artifact or the memory allows is checked where these are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, TypedDict, Unpack, get_args

from ..artifact import Artifact
from ..artifact.manifest import Manifest
from ..artifact.model_config import ModelConfig
from ..cache.prefix_match import MatchPolicy
from ..chat.chat_template import checked_kwargs
from ..errors import InvalidParameter
from ..model.batch import Runner
from ..store import PageStore
from .prompts import SuffixPolicy
from .request_options import RequestOptions, checked_budget, checked_match
from .step.policy import SchedulerPolicy
from .waiting_request import AdmissionPolicy

_LOGGER = logging.getLogger(__name__)

DEFAULT_STORE_BYTES = 10_000_000_000
_NUMBERS: dict[str, type] = {"int": Integral, "float": Real}  # what an option of a type may be
MAX_THREADS = 1024  # far above it the thread pool aborts the process

SpeculatePolicy = Literal["auto", "off", "lookup", "draft"]
"""Where guesses of what replies go on with come from."""

OpenRunner = Callable[[Artifact, int, int | None], Runner]
"""Makes a runner of an artifact, with a number of KV pages and of threads."""


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineOptions`, for callers that write them as keywords."""

    kv_cache_bytes: int | None
    state_cache_bytes: int | None
    context_length: int | None
    max_num_seqs: int
    max_queue: int | None
    max_num_batched_tokens: int | None
    prefill_ms: float | None
    admission: AdmissionPolicy
    num_threads: int | None
    match: MatchPolicy
    strip_suffix: SuffixPolicy
    template_kwargs: Mapping[str, object] | None
    cache_ttl_s: float | None
    idle_work: bool
    speculate: SpeculatePolicy
    draft: str | Path | Artifact | None
    store: str | Path | PageStore | None
    store_bytes: int
    kv_budget: float | None
    chunk_cache_bytes: int | None
    clock: Callable[[], float]
    open_runner: OpenRunner | None
    kv_log: str | Path | None
    kv_log_bytes: int | None


@dataclass(frozen=True)
class EngineOptions:
    """Options of an engine.

    Attributes:
        kv_cache_bytes: memory for KV pages; None: a quarter of the available memory, but no more than
            `max_num_seqs` full contexts need. One that holds less than the context shortens it, with a warning.
        state_cache_bytes: memory for states of a recurrent model, of running requests and of snapshots that prefixes
            are reused from; None: an eighth of the available memory, at most 1 GiB. Other models have none.
        context_length: tokens of prompt and reply together; None: the model's, or as many as the KV pages hold.
        max_num_seqs: requests computed together; more wait.
        max_queue: requests that may wait beside those; more are refused with EngineOverloaded; None: any number.
        max_num_batched_tokens: tokens of one step, at most the artifact's own limit; None: that limit.
        prefill_ms: milliseconds that a step takes for parts of prompts while others wait or stream, by what steps took
            lately, or longer where such a part would cost far more a token; prompts that end in it have 250 together.
            Beside long prompts streams keep half of their speed. None: as long as its tokens take.
        admission: what of a reply has pages reserved when its request is let in: `optimistic` one token, and the newest
            request gives its pages back when they become too few; `conservative` `max_tokens`, and none ever does.
        num_threads: threads of the kernels, 1 to 1024; None: the runtime's choice.
        match: how cached prefixes may be found, unless a request says otherwise: `exact` by the ids of the prompt's
            encoding; `seam` the same, but a prompt that goes on from an earlier one is not encoded whole again; `text`
            also what the model generated, where it spells the prompt's text in other ids; `off`: nothing is found for a
            request, and nothing is kept of it, in memory or on disk.
        strip_suffix: which prompts are fed without the token of a lone space at their end (Llama-2's 29871), which the
            next turn's prompt would not have: `text`, chats and texts; `always`, token ids as well; `never`, none. The
            reply begins with that space, and is sent without it.
        template_kwargs: variables of the chat template, such as `enable_thinking`, unless a request sets them itself.
        cache_ttl_s: cached prefixes that no request uses for so many seconds are dropped; None: only to make room.
        idle_work: compute what a conversation's next prompt begins with, while nothing else is to be done, where the
            chat template renders a reply otherwise than it was generated, as without its thought; on free pages alone.
        speculate: guess what replies go on with, and check the guesses as rows of one step: no reply changes by a
            byte. `lookup`: by a request's own tokens and by what its namespace's cache goes on with; `draft`: by the
            `draft` alone; `off`: one token a step; `auto`: what is never slower, which is all that there is, but `off`
            with a `kv_budget`.
        draft: a second, smaller artifact whose tokenizer has the same tokens, that guesses. It has KV pages of its own,
            a quarter of the first's bytes at most. None: there is none.
        store: a directory for what memory has no room for, and for the next process; None: no disk is used. A prefix
            on disk is loaded where that is quicker than computing it, and is the same to the last bit. Or a store
            that was opened for this artifact, which the engine closes.
        store_bytes: that the store's files may take.
        kv_budget: the share of a stored prefix's keys and values that is enough, unless a request says otherwise;
            `usage.pruning` says of a reply that it is not exact. From prompts is learned which tokens matter, so that
            computing these takes longer. None: all is always loaded, and requests may not ask for less. The artifact
            must have been calibrated (`radixlm calibrate`).
        chunk_cache_bytes: memory for keys and values that are read often for a kv_budget; 0 keeps none; None: 64 MiB.
        clock: seconds; only differences count.
        open_runner: what runs the artifact; None: the native runtime.
        kv_log: a file to which every change of sequences and pages is added as a line; see `runtime/kv_log/`.
        kv_log_bytes: with so many, that file is renamed, and the oldest of those that were goes; None: it only grows.

    Raises:
        InvalidParameter: a value is outside its range.
    """

    kv_cache_bytes: int | None = None
    state_cache_bytes: int | None = None
    context_length: int | None = None
    max_num_seqs: int = 64
    max_queue: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_ms: float | None = 50.0
    admission: AdmissionPolicy = "optimistic"
    num_threads: int | None = None
    match: MatchPolicy = "text"
    strip_suffix: SuffixPolicy = "text"
    template_kwargs: Mapping[str, object] | None = None
    cache_ttl_s: float | None = None
    idle_work: bool = True
    speculate: SpeculatePolicy = "auto"
    draft: str | Path | Artifact | None = None
    store: str | Path | PageStore | None = None
    store_bytes: int = DEFAULT_STORE_BYTES
    kv_budget: float | None = None
    chunk_cache_bytes: int | None = None
    clock: Callable[[], float] = time.monotonic
    open_runner: OpenRunner | None = None
    kv_log: str | Path | None = None
    kv_log_bytes: int | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value, kinds = getattr(self, option.name), _NUMBERS.get(str(option.type).removesuffix(" | None"))
            if kinds and value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
                kind = "a whole number" if kinds is Integral else "a number"
                raise InvalidParameter(f"{option.name} is {value!r:.60}; it must be {kind}")
        if self.max_queue is not None and self.max_queue < 0:
            raise InvalidParameter(f"max_queue is {self.max_queue}; it must be 0 or more, or None")
        if self.prefill_ms is not None and not self.prefill_ms > 0:
            raise InvalidParameter(f"prefill_ms is {self.prefill_ms}; it must be above 0, or None")
        if self.speculate not in get_args(SpeculatePolicy):
            allowed = ", ".join(get_args(SpeculatePolicy))
            raise InvalidParameter(f"speculate is {self.speculate!r}; use one of {allowed}")
        if self.speculate == "draft" and self.draft is None:
            raise InvalidParameter("speculate is 'draft', and there is no draft; give a second artifact (--draft)")
        if self.draft is not None and self.speculate in ("off", "lookup"):
            raise InvalidParameter(f"a draft is given and speculate is {self.speculate!r}; leave one of them out")
        if self.draft is not None and self.kv_budget is not None:
            raise InvalidParameter("a draft guesses replies of whole prefixes; leave it out, or kv_budget")
        if self.speculate == "lookup" and self.kv_budget is not None:
            raise InvalidParameter("speculate guesses replies of whole prefixes; leave it out, or kv_budget")
        if self.admission not in get_args(AdmissionPolicy):
            allowed = ", ".join(get_args(AdmissionPolicy))
            raise InvalidParameter(f"admission is {self.admission!r}; use one of {allowed}")
        checked_match(self.match)
        if self.template_kwargs is not None:
            checked_kwargs(self.template_kwargs)
        if self.num_threads is not None and not 1 <= self.num_threads <= MAX_THREADS:
            raise InvalidParameter(f"num_threads is {self.num_threads}; it must be 1 to {MAX_THREADS}, or None")
        if self.kv_budget is not None:
            checked_budget(self.kv_budget)
            if self.store is None:
                raise InvalidParameter("kv_budget is of what a store keeps; give a store, or leave it out")
        if self.chunk_cache_bytes is not None and (self.kv_budget is None or self.chunk_cache_bytes < 0):
            raise InvalidParameter(
                f"chunk_cache_bytes is {self.chunk_cache_bytes}; it must be 0 or more, and is for a kv_budget alone"
            )

    @property
    def max_num_requests(self) -> int | None:
        """How many requests may run and wait together; None: any number."""
        return None if self.max_queue is None else self.max_num_seqs + self.max_queue

    def changed(self, **keywords: Unpack[EngineKeywords]) -> EngineOptions:
        """The same options but for those given here."""
        return replace(self, **keywords)

    def check_model(self, model: ModelConfig) -> None:
        """Raise InvalidParameter where the model does not allow an option."""
        if self.kv_budget is not None:
            _require_partial(self.kv_budget, model)

    def decide(self, asked: RequestOptions, model: ModelConfig) -> RequestOptions:
        """What a request asks for, with the engine's choices where it makes none.

        Raises:
            InvalidParameter: it asks for a part of stored prefixes, and the model allows none, or this engine loads
                all.
        """
        kv_budget = self.kv_budget if asked.kv_budget is None else asked.kv_budget
        if self.kv_budget is None and kv_budget is not None and kv_budget < 1:
            _require_partial(kv_budget, model)
            raise InvalidParameter(
                f"kv_budget is {kv_budget}, and all of a prefix is loaded here; leave it out, or open the engine with "
                f"a kv_budget (radixlm serve --kv-budget)",
                param="kv_budget",
            )
        return asked.changed(cache_match=asked.cache_match or self.match, kv_budget=kv_budget)

    def _speculates(self, model: ModelConfig) -> bool:
        """Whether replies are guessed. A wrong guess has a recurrent model compute the right ones before it again, so
        that it must be asked for."""
        asked = ("lookup", "draft") if model.state_bytes else ("auto", "lookup", "draft")
        return self.speculate in asked and self.kv_budget is None

    def scheduler_policy(self, manifest: Manifest) -> SchedulerPolicy:
        """The limits of a step.

        Raises:
            InvalidParameter: the artifact does not allow these.
        """
        limits = manifest.module
        most = self.max_num_batched_tokens
        most = limits.max_num_tokens if most is None else most
        _require_within("max_num_seqs", self.max_num_seqs, min(limits.max_num_logits, limits.max_num_tokens))
        _require_within("max_num_batched_tokens", most, limits.max_num_tokens)
        if most < self.max_num_seqs:
            _LOGGER.warning(
                "max_num_batched_tokens is %d: no more than that of max_num_seqs %d requests decode in a step",
                *(most, self.max_num_seqs),
            )
        return SchedulerPolicy(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=most,
            max_num_logits=limits.max_num_logits,
            admission=self.admission,
            prompts_s=None if self.prefill_ms is None else self.prefill_ms / 1000,
            speculates=self._speculates(manifest.model),
            looks_up=self.speculate != "draft",
        )


def _require_partial(kv_budget: float, model: ModelConfig) -> None:
    if (why := model.why_not_partial) is not None:
        raise InvalidParameter(
            f"kv_budget is {kv_budget}, and this model needs all of its keys and values: {why}; leave kv_budget out",
            param="kv_budget",
        )


def _require_within(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidParameter(f"{name} is {value!r}; this artifact allows 1 to {most}")
