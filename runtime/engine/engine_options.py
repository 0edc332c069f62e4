"""Options for opening an engine: each is declared only here, and the command line's flags are made from them.

Knows ranges. What an artifact or the memory allows is checked where they are known.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..artifact import Artifact
from ..artifact.manifest import Manifest
from ..artifact.model_config import ModelConfig
from ..cache.why_not_more import MatchPolicy
from ..chat.chat_template import checked_kwargs
from ..errors import InvalidParameter
from ..fields import Flag, brief, check_fields, check_needs, documented, fields_of, given_of, option
from ..model.batch import Runner
from ..optional import Extra, extra_of
from ..store import PageStore
from .generation_stream import Recorder
from .prompts import SuffixPolicy
from .request_options import RequestOptions
from .step.plan import AdmissionPolicy, SchedulerPolicy

_LOGGER = logging.getLogger(__name__)

MAX_THREADS = 1024  # limit of `compile/codegen/thread_pool.ll`

SpeculatePolicy = Literal["auto", "off", "lookup", "draft", "mtp"]
"""Sources of draft tokens for speculative decoding."""

OpenRunner = Callable[[Artifact, int, int | None], Runner]
"""Open a runner of an artifact, given the number of KV pages and of threads."""


_GB, _MB = ("GB", 1e9), ("MB", 1e6)


@documented
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine.

    Raises:
        InvalidParameter: a value is outside its range, or two contradict each other.
    """

    memory_bytes: int | None = option(
        None,
        "Memory for weights, KV cache and states together; of a server with several models, for those of all that are "
        "loaded.",
        unset="what is free",
        above=0,
        flag=Flag("--memory-gb", "engine", unit=_GB),
    )
    kv_cache_bytes: int | None = option(
        None,
        "Memory for the KV cache. One that holds less than the context shortens it, with a warning.",
        unset="as much as `max_num_seqs` full contexts need, up to a quarter of `memory_bytes`, half for one context",
        above=0,
        flag=Flag("--kv-cache-gb", "engine", unit=_GB),
    )
    state_cache_bytes: int | None = option(
        None,
        "Memory for the states of a recurrent model, of running requests and of snapshots that prefixes are reused "
        "from. Other models have none.",
        unset="an eighth of what is free, 1 GiB at most",
        above=0,
        flag=Flag("--state-cache-gb", "engine", unit=_GB),
    )
    context_length: int | None = option(
        None,
        "Tokens of prompt and reply together, at most the model's. What `kv_cache_bytes` does not hold is refused.",
        unset="the model's, or as many as `kv_cache_bytes` holds",
        low=1,
        flag=Flag("--context-length", "engine", metavar="TOKENS"),
    )
    max_num_seqs: int = option(
        64,
        "Requests that are computed at once; more wait. The KV cache is sized for them.",
        low=1,
        flag=Flag("--max-num-seqs", "engine"),
    )
    max_queue: int | None = option(
        None,
        "Requests that may wait, besides the `max_num_seqs` that are computed; more are refused (HTTP 429).",
        unset="any number",
        low=0,
        flag=Flag("--max-queue", "serve", default=256),
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Tokens computed in one step, of all requests. Fewer let running replies go on sooner beside a long prompt.",
        unset="as many as the artifact takes",
        low=1,
        flag=Flag("--max-num-batched-tokens", "serve", metavar="TOKENS"),
    )
    prefill_ms: float = option(
        50.0,
        "Milliseconds that a step computes prompts while other requests wait or decode, or longer where so short a "
        "part would cost far more a token; prompts that end in it have 250 together. Beside long prompts decoding "
        "requests keep half of their speed. 0: as long as its tokens take.",
        low=0,
        flag=Flag("--prefill-ms", "serve", metavar="MS"),
    )
    admission: AdmissionPolicy = option(
        "optimistic",
        "What of a reply has memory reserved when its request begins. `optimistic`: one token, so that more run at "
        "once, and the newest is preempted when memory runs out; `conservative`: max_tokens, or the context if a "
        "request does not say, so that none is preempted.",
        flag=Flag("--admission", "serve"),
    )
    num_threads: int | None = option(
        None,
        "Threads to compute with.",
        unset="every processor that the process may use",
        low=1,
        high=MAX_THREADS,
        flag=Flag("--threads", "engine"),
    )
    match: MatchPolicy = option(
        "text",
        "How cached prefixes are found, unless a request says otherwise. `exact`: by the ids of the prompt; `seam`: "
        "the same, without encoding all of it again; `text`: also what the model generated, where that spells the "
        "prompt in other ids; `off`: nothing is reused, and nothing kept, in memory or on disk.",
        flag=Flag("--match", "engine"),
    )
    strip_suffix: SuffixPolicy = option(
        "text",
        "Which prompts are computed without the token of a lone space at their end, as Llama-2's 29871, which the next "
        "turn's prompt would not have. `text`: chats and texts; `always`: token ids, too; `never`: none. The reply "
        "begins with that space, and is sent without it.",
        flag=Flag("--strip-suffix", "engine"),
    )
    template_kwargs: Mapping[str, object] | None = option(
        None,
        "Variables of the chat template, unless a request sets them: '{\"enable_thinking\": false}'.",
        flag=Flag("--chat-template-kwargs", "engine"),
    )
    cache_ttl_s: float | None = option(
        None,
        "Seconds after which a cached prefix that was not used is dropped.",
        unset="only to make room",
        above=0,
        flag=Flag("--cache-ttl", "serve", metavar="SECONDS"),
    )
    idle_work: bool = option(
        True,
        "While there is nothing else to do, compute what a conversation's next prompt begins with, where the chat "
        "template drops a reply's reasoning; on free memory alone.",
        flag=Flag("--idle-work", "serve"),
    )
    speculate: SpeculatePolicy = option(
        "auto",
        "Speculative decoding: draft what replies go on with, and check the draft as rows of one step, where that "
        "pays; no reply changes by a byte. `lookup`: drafts from the request's own tokens and from the cache of its "
        "namespace; `draft`: from the draft model alone; `mtp`: from the model's multi-token prediction head alone; "
        "`auto`: from all that there is, unless there is a `kv_budget`; `off`: one token a step.",
        flag=Flag("--speculate", "speculation"),
    )
    draft: str | Path | Artifact | None = option(
        None,
        "A draft model: a second, smaller model, whose tokenizer has the same tokens. Its KV cache takes a quarter of "
        "`kv_cache_bytes` at most.",
        flag=Flag("--draft", "speculation", metavar="MODEL", path="model"),
    )
    store: str | Path | PageStore | None = option(
        None,
        "A directory that keeps prefixes on disk, too: for the next start, and for when memory has no room. They are "
        "loaded where that is quicker than to compute them, and are the same to the last bit.",
        unset="nothing is kept on disk",
        flag=Flag("--store", "disk", metavar="DIR", path="directory"),
    )
    store_bytes: int = option(
        10_000_000_000,
        "What the files in `store` may take.",
        above=0,
        needs="store",
        flag=Flag("--store-gb", "disk", unit=_GB),
    )
    kv_budget: float | None = option(
        None,
        "Of a prefix in `store`, load the share of KV that matters most, 0.5 for a half, where that is quicker: "
        "replies are near what they would be, not exact, and say so. Where answers matter, leave it out, or give 1, "
        "with which only requests that ask for less get less. radixlm calibrate comes first, and no request gets less "
        "than it found enough.",
        unset="all is loaded, whatever is asked for",
        above=0,
        high=1,
        needs="store",
        flag=Flag("--kv-budget", "disk", metavar="SHARE"),
    )
    chunk_cache_bytes: int | None = option(
        None,
        "Memory for KV of `kv_budget` that is read often; 0 keeps none.",
        unset="64 MiB",
        low=0,
        needs="kv_budget",
        flag=Flag("--chunk-cache-mb", "disk", unit=_MB, metavar="MB"),
    )
    loras: Mapping[str, str | Path] | None = option(
        None,
        "LoRA adapters by the names that requests give: folders of PEFT, or GGUF files. The artifact must have room "
        "for them (compile --max-loras).",
        unset="there are none",
        flag=Flag("--lora", "serve", metavar="NAME=PATH"),
    )
    kv_log: str | Path | None = option(
        None,
        "A file to which each change of a sequence or its pages is added as a line of JSON; replay-kv checks them.",
        flag=Flag("--log-kv", "serve", metavar="FILE", path="file"),
    )
    kv_log_bytes: int | None = option(
        100_000_000,
        "The size at which the file of `kv_log` is renamed to FILE.1, what was that to FILE.2, and so on up to FILE.4.",
        unset="it only grows",
        above=0,
        needs="kv_log",
        flag=Flag("--log-kv-mb", "serve", unit=_MB, metavar="MB"),
    )
    recorder: Recorder | None = option(None, "What notes requests and replies, to be replayed.", unset="nothing")
    clock: Callable[[], float] = option(time.monotonic, "Seconds; only differences count.")
    open_runner: OpenRunner | None = option(None, "What runs the artifact.", unset="the native runtime")

    def __post_init__(self) -> None:
        check_fields(self)
        extra = self.extra
        check_needs(fields_of(EngineOptions), given_of(self))
        if self.speculate == "draft" and self.draft is None:
            raise InvalidParameter("speculate is 'draft', and there is no draft; give a second model (--draft)")
        if self.draft is not None and self.speculate in ("off", "lookup"):
            raise InvalidParameter(f"a draft is given and speculate is {self.speculate!r}; leave one of them out")
        if self.draft is not None and self.speculate == "mtp":
            raise InvalidParameter("a draft is given and speculate is 'mtp'; leave one of them out")
        if extra is not None:
            extra.check_options(self)
        if extra is not None and self.loras:
            raise InvalidParameter("loras are given and a kv_budget, by which no adapter was calibrated; leave one out")
        if self.template_kwargs is not None:
            checked_kwargs(self.template_kwargs)

    __repr__ = brief

    @property
    def extra(self) -> Extra | None:
        """The extra that one of these options belongs to; None if none does."""
        return extra_of(self)

    @property
    def max_num_requests(self) -> int | None:
        """The most requests that run and wait together; None: any number."""
        return None if self.max_queue is None else self.max_num_seqs + self.max_queue

    def decide(self, asked: RequestOptions, model: ModelConfig) -> RequestOptions:
        """Return a request's options, with the engine's choices for those that it leaves open.

        Raises:
            InvalidParameter: the model or the engine does not allow it.
        """
        decided = asked.changed(cache_match=asked.cache_match or self.match)
        if (extra := extra_of(self, asked)) is None:
            return decided
        chosen: RequestOptions = extra.decide(self, decided, model)
        return chosen

    def uses_mtp(self, model: ModelConfig) -> bool:
        """Return whether the model's MTP head drafts tokens.

        Raises:
            InvalidParameter: it is requested, and the model has none.
        """
        if self.speculate == "mtp" and model.mtp is None:
            raise InvalidParameter(
                "speculate is 'mtp', and this model has no multi-token prediction head; leave it out, or compile a "
                "source that has one again",
                param="speculate",
            )
        is_asked = self.speculate == "mtp" or (self.speculate == "auto" and self.draft is None)
        return is_asked and model.mtp is not None and self._speculates(model)

    def _speculates(self, model: ModelConfig) -> bool:
        """Return whether replies are drafted.

        After a rejected draft token a recurrent model computes the accepted ones again. So by default it drafts only if
        it has an MTP head.
        """
        is_off = self.speculate == "off" or (self.speculate == "auto" and model.state_bytes and model.mtp is None)
        return not is_off and (self.extra is None or self.extra.speculates)

    def scheduler_policy(self, manifest: Manifest) -> SchedulerPolicy:
        """Return the limits of a step.

        Raises:
            InvalidParameter: the artifact does not allow these.
        """
        limits = manifest.module
        most = self.max_num_batched_tokens
        most = limits.max_num_tokens if most is None else most
        _require_within("max_num_seqs", self.max_num_seqs, min(limits.max_num_logits, limits.max_num_tokens))
        _require_within("max_num_batched_tokens", most, limits.max_num_tokens)
        is_whole = manifest.model.is_bidirectional
        if is_whole and most < limits.max_num_tokens:
            raise InvalidParameter(
                f"max_num_batched_tokens is {most}; this model computes a text of up to {limits.max_num_tokens} tokens "
                "in one step: leave it out"
            )
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
            prompts_s=None if is_whole else self.prefill_ms / 1000 or None,
            whole_prompts=is_whole,
            speculates=self._speculates(manifest.model),
            looks_up=self.speculate == "lookup" or (self.speculate == "auto" and not manifest.model.state_bytes),
        )


def _require_within(name: str, value: int, most: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidParameter(f"{name} is {value!r}; this artifact allows 1 to {most}")
