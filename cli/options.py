"""Options that several commands share: how to compile, and how to open the engine."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from radixlm.runtime import Engine
    from radixlm.runtime.cache.prefix_match import MatchPolicy
    from radixlm.runtime.engine.engine_options import OpenRunner, SpeculatePolicy
    from radixlm.runtime.engine.prompts import SuffixPolicy
    from radixlm.runtime.engine.waiting_request import AdmissionPolicy

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_STORE_GB = 10.0
DEFAULT_PREFILL_MS = 50.0


class JSONObject(click.ParamType[dict[str, Any]]):
    """An option whose value is an object in JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """The object.

        Raises:
            BadParameter: it is none.
        """
        if isinstance(value, dict):
            return value
        try:
            read = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r} is no JSON: {error}", param, ctx)
        if not isinstance(read, dict):
            self.fail(f"{value!r} is no object in JSON", param, ctx)
        return read


@dataclass(frozen=True)
class EngineOptions:
    """How to open an artifact."""

    kv_cache_gb: float | None
    max_num_seqs: int
    threads: int | None
    match: MatchPolicy
    strip_suffix: SuffixPolicy = "text"
    chat_template_kwargs: dict[str, Any] | None = None
    state_cache_gb: float | None = None
    store: str | None = None
    store_gb: float | None = None
    kv_budget: float | None = None
    chunk_cache_mb: float | None = None
    draft: str | None = None
    speculate: SpeculatePolicy | None = None  # None: auto, but where it is said

    def open(
        self,
        artifact: Path,
        *,
        cache_ttl_s: float | None = None,
        max_queue: int | None = None,
        context_length: int | None = None,
        max_num_batched_tokens: int | None = None,
        prefill_ms: float | None = DEFAULT_PREFILL_MS,
        idle_work: bool = True,
        speculate: SpeculatePolicy = "auto",
        admission: AdmissionPolicy = "optimistic",
        kv_log: Path | None = None,
        kv_log_bytes: int | None = None,
        open_runner: OpenRunner | None = None,
    ) -> Engine:
        """An engine over `artifact`; the other arguments are the engine's own.

        Raises:
            ArtifactError: the artifact cannot be used.
        """
        from radixlm.runtime import Engine

        if self.kv_cache_gb is not None and not math.isfinite(self.kv_cache_gb):
            raise ValueError(f"--kv-cache-gb is {self.kv_cache_gb}; it must be a number of GB")
        if self.state_cache_gb is not None and not math.isfinite(self.state_cache_gb):
            raise ValueError(f"--state-cache-gb is {self.state_cache_gb}; it must be a number of GB")
        if self.store == "":
            raise ValueError("--store is empty; give a directory, or leave it out")
        if self.store is None and self.kv_budget is not None:
            raise ValueError("--kv-budget is given and --store is not; it is of what a store keeps")
        if self.kv_budget is None and self.chunk_cache_mb is not None:
            raise ValueError("--chunk-cache-mb is given and --kv-budget is not; it is for parts of prefixes")
        if self.chunk_cache_mb is not None and not math.isfinite(self.chunk_cache_mb):
            raise ValueError(f"--chunk-cache-mb is {self.chunk_cache_mb}; it must be a number of MB")
        if self.store is None and self.store_gb is not None:
            raise ValueError("--store-gb is given and --store is not; say where, too")
        store_gb = DEFAULT_STORE_GB if self.store_gb is None else self.store_gb
        if not math.isfinite(store_gb):
            raise ValueError(f"--store-gb is {store_gb}; it must be a number of GB")
        return Engine(
            artifact,
            kv_cache_bytes=None if self.kv_cache_gb is None else int(self.kv_cache_gb * 1e9),
            state_cache_bytes=None if self.state_cache_gb is None else int(self.state_cache_gb * 1e9),
            max_num_seqs=self.max_num_seqs,
            num_threads=self.threads,
            match=self.match,
            strip_suffix=self.strip_suffix,
            template_kwargs=self.chat_template_kwargs,
            store=None if self.store is None else Path(self.store),
            store_bytes=int(store_gb * 1e9),
            kv_budget=self.kv_budget,
            chunk_cache_bytes=None if self.chunk_cache_mb is None else int(self.chunk_cache_mb * 1e6),
            cache_ttl_s=cache_ttl_s,
            max_queue=max_queue,
            context_length=context_length,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_ms=prefill_ms or None,
            idle_work=idle_work,
            speculate=self.speculate or speculate,
            draft=None if self.draft is None else Path(self.draft),
            admission=admission,
            kv_log=kv_log,
            kv_log_bytes=kv_log_bytes,
            open_runner=open_runner,
        )


@dataclass(frozen=True)
class CompileOptions:
    """How to compile a model that is no artifact yet; None is the compiler's default."""

    quantize: str | None
    kv_dtype: str | None

    def artifact_of(
        self,
        model: str,
        say: Callable[[str], None] | None = None,
        meanwhile: AbstractContextManager[None] | None = None,
        *,
        written: Callable[[Path], None] | None = None,
        kept: Callable[[str], None] | None = None,
        on_disk: bool = False,
    ) -> Path:
        """Return the artifact of `model`, as `cached_artifact.artifact_of` does."""
        from .cached_artifact import artifact_of

        given = {"quantize": self.quantize, "kv-dtype": self.kv_dtype}
        options = {name: value for name, value in given.items() if value is not None}
        return artifact_of(model, options, say, meanwhile, written=written, kept=kept, on_disk=on_disk)


def compile_options(function: F) -> F:
    """Add the fields of `CompileOptions` as options; the function gets them as keyword arguments."""
    for option in (
        click.option(
            "--kv-dtype",
            type=click.Choice(["auto", "f16", "f32", "k12v8"]),
            help="Where MODEL is compiled now: how to store keys and values.  [default: auto]",
        ),
        click.option(
            "--quantize",
            type=click.Choice(["keep", "q4", "q8", "f16", "f32"]),
            help="Where MODEL is compiled now: how to store the weights.  [default: keep]",
        ),
    ):
        function = option(function)
    return function


def engine_options(function: F) -> F:
    """Add the fields of `EngineOptions` as options; the function gets them as keyword arguments."""
    for option in (
        click.option(
            "--match",
            type=click.Choice(["exact", "seam", "text", "off"]),
            default="text",
            show_default=True,
            help="How cached prefixes are found. exact: by the ids of the prompt; seam: the same, without encoding all "
            "of it again; text: also what the model generated, where that spells the prompt in other ids; off: nothing "
            "is reused, and nothing kept.",
        ),
        click.option(
            "--strip-suffix",
            type=click.Choice(["text", "always", "never"]),
            default="text",
            show_default=True,
            help="Which prompts are fed without the token of a lone space at their end, as Llama-2's 29871, which the "
            "next turn's prompt would not have. text: chats and texts; always: token ids, too; never: none. The reply "
            "begins with that space, and is sent without it.",
        ),
        click.option(
            "--chat-template-kwargs",
            type=JSONObject(),
            help="Variables of the chat template, unless a request sets them: '{\"enable_thinking\": false}'.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="Threads to compute with."),
        click.option(
            "--max-num-seqs",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Requests computed together; more wait.",
        ),
        click.option(
            "--kv-cache-gb",
            type=click.FloatRange(min=0, min_open=True),
            help="Memory for keys and values, in GB.  [default: as much as is needed, up to a quarter of what is free]",
        ),
        click.option(
            "--state-cache-gb",
            type=click.FloatRange(min=0, min_open=True),
            help="Memory for the states of a recurrent model, in GB.  [default: an eighth of what is free, 1 at most]",
        ),
    ):
        function = option(function)
    return function


def guess_options(function: F) -> F:
    """Add the fields of `EngineOptions` that say how replies are guessed."""
    for option in (
        click.option(
            "--draft",
            type=click.Path(exists=True, file_okay=False),
            metavar="ARTIFACT",
            help="Guess with a second, smaller artifact that has the same tokens, too; its pages take a quarter of "
            "--kv-cache-gb at most.",
        ),
        click.option(
            "--speculate",
            type=click.Choice(["auto", "off", "lookup", "draft"]),
            default="auto",
            show_default=True,
            help="Guess what replies go on with, and check the guesses as rows of one step, where that pays: no reply "
            "changes by a byte. lookup: by a request's own tokens, and by what the cache of its namespace goes on "
            "with; draft: by --draft alone; auto: by all that there is, unless there is a --kv-budget; off: one token "
            "a step.",
        ),
    ):
        function = option(function)
    return function


def store_options(function: F) -> F:
    """Add the fields of `EngineOptions` that keep prefixes on disk."""
    for option in (
        click.option(
            "--chunk-cache-mb",
            type=click.FloatRange(min=0),
            metavar="MB",
            help="Memory for keys and values of --kv-budget that are read often; 0 keeps none.  [default: 67]",
        ),
        click.option(
            "--kv-budget",
            type=click.FloatRange(min=0, max=1, min_open=True),
            metavar="SHARE",
            help="Of a prefix in --store, load the share of keys and values that matters most, 0.5 for a half, where "
            "that is quicker: replies are near what they would be, not exact, and say so. Where answers matter, leave "
            "it out, or give 1, with which only requests that ask for less get less. radixlm calibrate comes first, "
            "and no request gets less than it found enough.  [default: all is loaded, whatever is asked for]",
        ),
        click.option(
            "--store-gb",
            type=click.FloatRange(min=0, min_open=True),
            help=f"What the files in --store may take, in GB.  [default: {DEFAULT_STORE_GB:g}]",
        ),
        click.option(
            "--store",
            type=click.Path(file_okay=False),
            metavar="DIR",
            help="Keep prefixes on disk, too: for the next start, and for when memory has no room. They are loaded "
            "where that is quicker than to compute them.  [default: nothing is kept]",
        ),
    ):
        function = option(function)
    return function


T = TypeVar("T", bound="DataclassInstance")


def take(kind: type[T], options: dict[str, Any]) -> T:
    """The keyword arguments of a command that are the fields of `kind`, taken out of all of them."""
    return kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})
