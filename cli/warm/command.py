"""`radixlm warm`: prefill prompts into a store, so that first requests are cache hits."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..field_flags import CompileOptions, FieldCommand, compile_options, engine_keywords, take
from ..progress import ProgressDisplay
from ..serve import KeyOption
from .asking import Body, PrefillCounts, read_bodies, send_prefill

if TYPE_CHECKING:
    from radixlm.runtime import Engine

_SETTLED_S = 0.2  # the store is complete if nothing was written for this long


@click.command(
    "warm",
    cls=FieldCommand,
    flags=("engine", "store", "store_bytes", "context_length", "ignores_prompt_cache_key", "loras"),
    requires=("store",),
)
@click.argument("model")
@click.argument("sources", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE|REQUESTS...")
@click.option(
    "--api-key",
    "api_keys",
    cls=KeyOption,
    multiple=True,
    metavar="KEY",
    envvar="RADIXLM_API_KEY",
    show_envvar=True,
    help="API key of later requests; repeatable, because each has its own cache.  [default: requests without a key]",
)
@click.option(
    "--api-key-file",
    "api_key_files",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with API keys, one per line; repeatable.",
)
@click.option("--cache-salt", help="The cache_salt of later requests.  [default: that of each body]")
@click.option("--prompt-cache-key", help="The prompt_cache_key of later requests.  [default: that of each body]")
@compile_options
def command(
    model: str,
    sources: tuple[Path, ...],
    api_keys: tuple[str, ...],
    api_key_files: tuple[Path, ...],
    cache_salt: str | None,
    prompt_cache_key: str | None,
    ignores_prompt_cache_key: bool,
    **options: Any,
) -> None:
    """Prefill an agent's system prompt and tools into a store, where serve --store DIR finds them.

    A BUNDLE, written by `store export`, is imported, and nothing is computed. REQUESTS is a file of JSON lines, each
    the body of a request for /v1/chat/completions, /v1/responses, /v1/messages or /v1/completions, recognized by its
    fields, or by a field "path". Whole prompts are saved: later prompts can share any beginning of them.

    Only requests with the same API key, cache_salt and prompt_cache_key find the prefixes, and only with the same
    artifact and --chat-template-kwargs. For radixlm agent, add --ignore-prompt-cache-key, because it ignores that key,
    too. A store in use by a server is refused. With --lora, requests whose model is MODEL:NAME have that adapter.

    \b
    radixlm warm smollm2.radixlm --store cache bodies.jsonl
    radixlm serve smollm2.radixlm --store cache
    """
    from radixlm.runtime.server.http.api_keys import checked_keys, read_keys
    from radixlm.runtime.store import is_bundle

    keys = [*checked_keys(api_keys), *(key for path in api_key_files for key in read_keys(path))]
    bundles = [path for path in sources if is_bundle(path)]
    bodies = [body for path in sources if path not in bundles for body in read_bodies(path)]
    if ignores_prompt_cache_key and prompt_cache_key is not None:
        raise ValueError("--prompt-cache-key and --ignore-prompt-cache-key are both given; choose one")
    given = {"cache_salt": cache_salt, "prompt_cache_key": prompt_cache_key}
    cache_fields = {name: value for name, value in given.items() if value is not None}
    compiling = take(CompileOptions, options)
    opened = engine_keywords(options)
    artifact = compiling.artifact_of(model, on_disk=True, loras=opened.get("loras"))
    for bundle in bundles:
        _import_bundle(bundle, artifact, opened, keys or [None], cache_fields)
    if bodies:
        _prefill_bodies(bodies, artifact, opened, keys or [None], cache_fields, ignores_prompt_cache_key)


def _import_bundle(
    bundle: Path,
    artifact: Path,
    options: Mapping[str, Any],
    api_keys: Sequence[str | None],
    cache_fields: dict[str, str],
) -> None:
    """Save a bundle's pages in the store, once in the namespace of each API key, and print how many.

    Args:
        options: options of the engine, with the folder `store`.
        api_keys: None stands for requests without a key.
        cache_fields: `cache_salt` and `prompt_cache_key`, if given.
    """
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.artifact.manifest import PAGE_SIZE
    from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
    from radixlm.runtime.engine.engine_options import EngineOptions
    from radixlm.runtime.store import PageStore, StoreIdentity, import_bundle

    manifest = Artifact.open(artifact).manifest
    max_bytes = EngineOptions(**options).store_bytes
    with PageStore.open(Path(options["store"]), StoreIdentity.of(manifest), max_bytes=max_bytes) as store:
        namespaces = CacheNamespaces(ModelIdentity.of(manifest), store.secret)
        for key in api_keys:
            report = import_bundle(store, bundle, namespaces.of(CacheScope(key, **cache_fields)), evicts=True)
            tokens = report.num_stored * PAGE_SIZE
            click.echo(f"{bundle}: {report.num_stored:,} of {report.num_pages:,} pages are saved, {tokens:,} tokens")


def _prefill_bodies(
    bodies: Sequence[Body],
    artifact: Path,
    options: Mapping[str, Any],
    api_keys: Sequence[str | None],
    cache_fields: dict[str, str],
    ignores_prompt_cache_key: bool,
) -> None:
    """Prefill the bodies' prompts into the store, once for each API key, and print the token counts."""
    from radixlm.runtime import Engine
    from radixlm.runtime.artifact.manifest import PAGE_SIZE

    with Engine(artifact, **options, idle_work=False, prefill_ms=0) as engine:
        before = _num_stored_pages(engine)
        counts = [
            each
            for key in api_keys
            for each in _prefill_for_key(engine, bodies, key, cache_fields, ignores_prompt_cache_key)
        ]
        kept = _num_stored_pages(engine, waits=True)
    num_prompt, num_found = sum(each.num_prompt for each in counts), sum(each.num_found for each in counts)
    click.echo(
        f"{len(counts):,} prompts of {num_prompt:,} tokens: {num_prompt - num_found:,} computed, {num_found:,} found; "
        f"{options['store']} has {kept * PAGE_SIZE:,} tokens, {(kept - before) * PAGE_SIZE:,} more than before"
    )


def _prefill_for_key(
    engine: Engine,
    bodies: Sequence[Body],
    key: str | None,
    cache_fields: dict[str, str],
    ignores_prompt_cache_key: bool,
) -> list[PrefillCounts]:
    """Prefill the bodies' prompts through a server in this process, with one API key; return the counts of each.

    Raises:
        ValueError: the server refuses a body; the message begins with the body's line.
    """
    from radixlm.runtime.progress import Progress, Stage
    from radixlm.runtime.server import create_app

    keys = () if key is None else (key,)
    app = create_app(engine, api_keys=keys, ignores_prompt_cache_key=ignores_prompt_cache_key)
    model_id = engine.manifest.name
    counts = []
    stages = tuple(Stage(f"{number} of {len(bodies)}", "tokens", 1.0) for number in range(1, len(bodies) + 1))
    with ExitStack() as shown:
        display = shown.enter_context(ProgressDisplay(sys.stderr))
        for stage, body in zip(stages, bodies, strict=True):

            def progressed(done: int, total: int, stage: str = stage.name) -> None:
                display(Progress(stage, done, total, stages))

            lora = engine.adapters.of_model(body.fields.get("model"))
            asked = body.warming(model_id if lora is None else f"{model_id}:{lora}", cache_fields)
            try:
                counts.append(asyncio.run(send_prefill(app, body.path, asked, key, progressed)))
            except ValueError as error:
                raise ValueError(f"{body.where}: {error}") from error
    return counts


def _num_stored_pages(engine: Engine, *, waits: bool = False) -> int:
    """Return the number of pages in the store; with `waits`, after everything computed is written.

    Raises:
        StoreError: the store is off after an error.
    """
    from radixlm.runtime.errors import StoreError

    last = -1
    while True:
        found = engine.stats()
        stats = found.tier
        off_because = found.store_off_because if stats is None else stats.off_because
        if stats is None or off_because is not None:
            raise StoreError(f"the store is off: {off_because}; nothing more was saved")
        if not waits or (stats.num_saved_pages == last and not stats.num_queued_bytes):
            return stats.num_pages
        last = stats.num_saved_pages
        time.sleep(_SETTLED_S)
