"""Serve several models, each in a process of its own that starts when a request names the model.

Knows how models, flags and the router fit together, and when serving ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from radixlm.runtime.artifact import read_manifest
from radixlm.runtime.artifact.compiled_models import artifact_named
from radixlm.runtime.artifact.local_models import check_named
from radixlm.runtime.artifact.lora import no_room
from radixlm.runtime.artifact.manifest import Manifest
from radixlm.runtime.artifact.model_names import is_hub, part_paths
from radixlm.runtime.artifact.window_layers import WindowLayers
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.engine.kv_cache_size import KVCacheSize
from radixlm.runtime.errors import ArtifactError, InvalidParameter, SourceError
from radixlm.runtime.router.app import router_app
from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.router.model_table import ModelTable
from radixlm.runtime.router.worker_process import WorkerLoader, WorkerProcess
from radixlm.runtime.server.http.root_path import UnderRootPath
from radixlm.runtime.server.http.uvicorn_server import TLS, Address, server, uvicorn_config
from radixlm.runtime.server.server_options import ServerOptions
from radixlm.runtime.system import available_memory_bytes
from starlette.types import ASGIApp

from ..cached_artifact import artifact_path
from ..field_flags import CompileOptions, engine_keywords, take
from ..log_config import log_config, warn
from . import worker_flags
from .model_list import ModelEntry, read_models
from .pulled_models import PulledModels
from .worker_flags import WorkerFlags, parsed_flags, shared_flags, worker_environment

SHARE_OF_MEMORY = 0.9  # of the free memory at start, for models; each process takes another 60 MB
_log = logging.getLogger("radixlm.serve")


def serve_models(
    named: Sequence[str],
    address: Address,
    options: ServerOptions,
    *,
    given: Sequence[str],
    store: str | None,
    tls: TLS | None,
    root_path: str,
    log_format: str,
    grace_s: float,
    unload_after_s: float | None,
    memory_bytes: int | None,
    hides_cached_text: bool,
    pulled: Path | None,
) -> None:
    """Serve models until a signal stops the server. Each model's process is a complete server.

    Args:
        named: models, folders and TOML files.
        given: arguments of the command line.
        store: folder in which each model has a store.
        memory_bytes: memory for all loaded models; None: 90 % of the free memory.
        pulled: file with the names of the models that clients pulled; None: they cannot pull any.

    Raises:
        ArtifactError: a path has no model.
        SourceError: the same, of a model that is not compiled.
        InvalidParameter: no model is left, an option is invalid, or listening on the address failed.
    """
    if tls is not None:
        tls.check()
    ctx = click.get_current_context()
    budget = int(SHARE_OF_MEMORY * available_memory_bytes()) if memory_bytes is None else memory_bytes
    shared = shared_flags(ctx, given)

    def spec_of(entry: ModelEntry) -> ModelSpec:
        return _spec(ctx.command, entry, shared, store, budget)

    library = None if pulled is None else PulledModels(pulled, spec_of, partial(artifacts_of, ctx.command, shared))
    if library is not None:
        library.check()
    listed = [*read_models(named), *([] if library is None else library.entries)]
    specs = usable_specs(listed, spec_of, partial(warn, log_format=log_format))
    with address.listen() as listener:
        decided = address.decided(listener, options)
        flags = WorkerFlags(
            shared,
            budget,
            log_format,
            keys=options.api_keys,
            hides_cached_text=hides_cached_text or not decided.tells_cached_text,
        )
        loader = WorkerLoader(
            worker_flags.WORKER,
            flags.arguments,
            environment=worker_environment(ctx),
            headers=[(b"authorization", b"Bearer " + key.encode()) for key in options.api_keys[:1]],
            say=_say_json if log_format == "json" else _say_text,
        )
        table = ModelTable[WorkerProcess](specs, loader, budget, unload_after_s, log=_log.info)
        app: ASGIApp = router_app(table, decided, library)  # type: ignore[arg-type]
        config = uvicorn_config(
            UnderRootPath(app, root_path) if root_path else app,
            listener,
            tls,
            log_config(log_format),
            has_lifespan=True,
        )
        serving = server(config, table.stop_soon, grace_s)
        url = address.url(listener, tls) + root_path
        models = "1 model" if len(specs) == 1 else f"{len(specs)} models"
        for line in (f"serving {models} at {url}/v1, in {budget / 1e9:.1f} GB", f"web UI: {url}/"):
            _say(line, log_format)
        for spec in specs:
            also = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
            adapters = f"; LoRA adapters: {', '.join(spec.loras)}" if spec.loras else ""
            pinned = "; pinned" if spec.is_pinned else ""
            _say(f"model name: {spec.name}{also}{adapters}{pinned} ({spec.source})", log_format)
        serving.run(sockets=[listener])


def usable_specs(
    entries: Sequence[ModelEntry], spec_of: Callable[[ModelEntry], ModelSpec], warn: Callable[[str], None]
) -> list[ModelSpec]:
    """Return how to load each model. Those of folders that are certainly unusable are left out with a warning.

    Raises:
        InvalidParameter: none is left.
        RadixLMError: a model that was named itself is unusable.
    """
    specs, is_short = [], False
    for entry in entries:
        try:
            check_named(entry.source)
            specs.append(spec_of(entry))
        except (SourceError, ArtifactError) as error:
            if not entry.is_found:
                raise
            is_short = True
            warn(f"{entry.client_name} is left out: {error}")
    if is_short and not specs:
        raise InvalidParameter("no model is left to serve; the warnings name what is wrong with each")
    return specs


def artifacts_of(command: click.Command, shared: Sequence[str], spec: ModelSpec) -> Sequence[Path]:
    """Return the artifacts on disk that a model is served from: its own, then that of its draft model.

    Raises:
        ArtifactNotFound: an artifact is gone.
        OSError: files of the model are gone.
    """
    params = dict(parsed_flags(command, spec.source, [*shared, *spec.flags], spec.name))
    own = artifact_path(spec.source, take(CompileOptions, params).given)
    draft = params["draft"]
    return [own] if draft is None else [own, artifact_path(str(draft), {})]


def _spec(
    command: click.Command, entry: ModelEntry, shared: Sequence[str], store: str | None, budget: int
) -> ModelSpec:
    """Return the spec of a model, with the facts that are known before it is loaded.

    Raises:
        InvalidParameter: its options are invalid.
    """
    name, own_store = entry.client_name, (entry.options or {}).get("store")
    if own_store is None and store is not None:
        own_store = Path(store) / name.replace("/", "_")
    spec = ModelSpec(
        name,
        entry.source,
        aliases=entry.aliases,
        is_pinned=entry.is_pinned,
        loras=tuple(entry.loras),
        flags=tuple(entry.flags),
        store=None if own_store is None else str(own_store),
    )
    stored = [] if spec.store is None else ["--store", spec.store]
    params = parsed_flags(command, entry.source, [*shared, *stored, *entry.flags], entry.place)
    artifact = artifact_named(entry.source)
    if artifact is None:
        return replace(spec, needed_bytes=_source_bytes(entry.source))
    engine = EngineOptions(**engine_keywords(dict(params)))
    manifest = read_manifest(artifact)
    if entry.loras and not manifest.lora:
        raise InvalidParameter(f"{entry.place}: {no_room(len(entry.loras))}")
    spec = replace(spec, context_length=engine.context_length or manifest.context_length)
    try:
        return replace(spec, needed_bytes=_needed_bytes(manifest, engine, budget))
    except InvalidParameter as error:
        return replace(spec, too_large=f"{name}: {error}")


def _needed_bytes(manifest: Manifest, options: EngineOptions, budget: int) -> int:
    """Return the bytes of memory that the engine will need.

    Raises:
        InvalidParameter: it does not fit into the budget.
    """
    adapter_bytes = len(options.loras or {}) * manifest.lora.adapter_bytes if manifest.lora else 0
    size = KVCacheSize.choose(
        manifest,
        kv_cache_bytes=options.kv_cache_bytes,
        max_num_seqs=options.max_num_seqs,
        context_length=options.context_length,
        available_bytes=max(0, budget - adapter_bytes),
        state_cache_bytes=options.state_cache_bytes,
        window_layers=WindowLayers.of(manifest.model, manifest.kv),
    )
    needed = size.memory_bytes(manifest) + adapter_bytes
    if options.draft is not None and (artifact := artifact_named(str(options.draft))) is not None:
        draft = read_manifest(artifact)
        pages = KVCacheSize.of_draft(draft, model=manifest, size=size, available_bytes=budget)
        needed += pages.memory_bytes(draft)
    return needed


def _source_bytes(source: str) -> int | None:
    """Return the size of a model's files, the minimum size of its weights; None if it is not on this machine."""
    if is_hub(source) or not (path := Path(source)).exists():
        return None
    files = path.glob("*.safetensors") if path.is_dir() else part_paths(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def _say(text: str, log_format: str) -> None:
    """Print a line for the operator, or log it with `--log-format json`."""
    if log_format == "json":
        _log.info("%s", text)
    else:
        click.echo(text, err=True)


def _say_text(name: str, line: str) -> None:
    click.echo(f"[{name}] {line}", err=True)


def _say_json(name: str, line: str) -> None:
    """Write a JSON line of a model's process to stderr, with the model's name."""
    try:
        record: Mapping[str, object] = json.loads(line)
        click.echo(json.dumps({"model": name, **record}, ensure_ascii=False), err=True)
    except (ValueError, TypeError):
        _log.info("%s: %s", name, line)
