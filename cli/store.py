"""`radixlm store`: list, verify, clean, export and import the prefixes in a store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .field_flags import CompileOptions, compile_options, take

if TYPE_CHECKING:
    from radixlm.runtime.store.catalogue import Run, StoredModel

DIRECTORY = click.argument("directory", type=click.Path(path_type=Path))
_ALL_OF_THE_DISK = 1 << 62  # bytes: no limit but the disk
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("store")
def command() -> None:
    """Manage the directory of `serve --store`, which has prefixes in pages of 16 tokens.

    ls, stats, verify and export work while a server uses the directory; gc and import do not.

    \b
    radixlm store ls cache
    radixlm store verify cache
    radixlm store export cache 3f9ac20d17be -o system-prompt.pages
    """


@command.command("ls")
@DIRECTORY
@click.option("--artifact", metavar="MODEL", help="Show the text of this model's pages.")
@compile_options
@AS_JSON
def ls(directory: Path, artifact: str | None, as_json: bool, **options: Any) -> None:
    """List runs of pages between points where prompts branch or end. A run's key is that of its last page.

    \b
    radixlm store ls cache --artifact smollm2.radixlm
    """
    from radixlm.runtime.store.catalogue import Catalogue, runs

    catalogue, compiling = Catalogue.read(directory), take(CompileOptions, options)
    text_of = decoder_of(None if artifact is None else compiling.artifact_of(artifact, on_disk=True))
    listed = [(model, list(runs(model.pages))) for model in catalogue.models]
    if as_json:
        _print_json(
            [
                described_model(model) | {"runs": [described_run(run, text_of(model)) for run in runs_of]}
                for model, runs_of in listed
            ]
        )
        return
    for model, runs_of in listed:
        click.echo(title_of(model))
        namespace = None
        for run in runs_of:
            if run.pages[0].namespace != namespace:
                namespace = run.pages[0].namespace
                click.echo("  " + name_of(namespace))
            click.echo("    " + line_of(described_run(run, text_of(model)), run.depth))
    if not listed:
        click.echo("no pages")


@command.command("stats")
@DIRECTORY
@AS_JSON
def stats(directory: Path, as_json: bool) -> None:
    """Show the number of pages of each model, and the disk space that they take.

    \b
    radixlm store stats cache
    """
    from radixlm.runtime.store.catalogue import Catalogue

    catalogue = Catalogue.read(directory)
    described = [described_model(model) for model in catalogue.models]
    if as_json:
        _print_json({"models": described, "num_broken_rows": catalogue.num_broken})
        return
    for model in catalogue.models:
        click.echo(title_of(model))
        for namespace, num_pages in Counter(page.namespace for page in model.pages).most_common():
            click.echo(f"  {name_of(namespace)}  {num_pages:,} pages")
        for segment in model.segments:
            state = "full" if segment.is_sealed else "open"
            begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(segment.begun_at))
            click.echo(f"  segment {segment.number}  {segment.num_bytes / 1e6:,.1f} MB, {state}, begun {begun}")
    click.echo(f"{sum(model.num_bytes for model in catalogue.models) / 1e6:,.1f} MB in all")


@command.command("verify")
@DIRECTORY
def verify_(directory: Path) -> None:
    """Read every page, and compare its checksum. The exit code is 2 if one is damaged. Nothing is changed.

    \b
    radixlm store verify cache
    """
    from radixlm.runtime.errors import StoreCorrupt
    from radixlm.runtime.optional import record_kinds
    from radixlm.runtime.store import OSFiles
    from radixlm.runtime.store.catalogue import Catalogue, verify

    num_broken = Catalogue.read(directory).num_broken
    report = verify(directory, OSFiles(), kinds=record_kinds())
    click.echo(f"{report.num_pages:,} pages are valid ({report.num_bytes / 1e6:,.1f} MB read)")
    bad = Counter(report.bad) + Counter({"index": max(0, num_broken - report.bad.get("index", 0))})
    if bad:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(bad.items()))
        num_pages = bad.total() + report.num_pages
        raise StoreCorrupt(f"{bad.total()} of {num_pages:,} pages are damaged ({kinds}); a server computes them again")


@command.command("gc")
@DIRECTORY
def gc(directory: Path) -> None:
    """Free the space of pages that no prompt can find any more.

    \b
    radixlm store gc cache
    """
    from radixlm.runtime.errors import StoreError
    from radixlm.runtime.optional import installed
    from radixlm.runtime.store import OSFiles, PageStore
    from radixlm.runtime.store.segment import read_segments

    segments = {n: segment for n, segment in read_segments(directory, OSFiles()).items() if segment is not None}
    if not segments:
        click.echo("no pages")
        return
    identity = segments[max(segments)].identity
    with PageStore.open(directory, identity, max_bytes=_ALL_OF_THE_DISK) as store:
        for extra in installed():
            extra.attach(store)
        report, off_because = store.gc(), store.stats().off_because
    if off_because is not None:
        raise StoreError(f"the space could not be freed: {off_because}; run it again when the disk works")
    click.echo(
        f"{report.num_segments_removed} segments removed, {report.num_pages_moved:,} pages copied: "
        f"{report.bytes_before / 1e6:,.1f} MB before, {report.bytes_after / 1e6:,.1f} MB after"
    )


@command.command("export")
@DIRECTORY
@click.argument("key")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Path of the bundle to write.")
def export(directory: Path, key: str, output: Path) -> None:
    """Write the page KEY and all pages before it to a bundle.

    KEY is a key shown by `ls`, or a unique prefix of one. A bundle has the same bytes wherever it was computed.

    \b
    radixlm store export cache 3f9ac20d17be -o system-prompt.pages
    """
    from radixlm.runtime.artifact.manifest import PAGE_SIZE
    from radixlm.runtime.store import export_bundle
    from radixlm.runtime.store.catalogue import Catalogue, StoredPages

    identity, page_keys = Catalogue.read(directory).find(key)
    export_bundle(StoredPages(directory, identity), page_keys, output)
    num_pages, num_bytes = len(page_keys), output.stat().st_size
    click.echo(f"{num_pages:,} pages, {num_pages * PAGE_SIZE:,} tokens, {num_bytes / 1e6:,.1f} MB")


@command.command("import")
@DIRECTORY
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--artifact", metavar="MODEL", required=True, help="The model that will use the pages.")
@click.option(
    "--store-gb",
    type=click.FloatRange(min=0, min_open=True),
    help="Maximum size of the store; the oldest pages are evicted.  [default: the free disk space, without eviction]",
)
@click.option(
    "--api-key-file", type=click.Path(path_type=Path), help="File with the API key of the requests that will use them."
)
@click.option("--cache-salt", help="The cache_salt of the requests that will use them.")
@click.option("--prompt-cache-key", help="The prompt_cache_key of the requests that will use them.")
@compile_options
def import_(
    directory: Path,
    bundle: Path,
    artifact: str,
    store_gb: float | None,
    api_key_file: Path | None,
    cache_salt: str | None,
    prompt_cache_key: str | None,
    **options: Any,
) -> None:
    """Import the pages of BUNDLE, for requests without an API key unless one is given.

    The bundle must be from the same artifact. No pages are evicted for it without --store-gb; a server with a smaller
    --store-gb evicts the oldest later. radixlm cannot verify that KV belongs to its tokens: import only bundles that
    you trust.

    \b
    radixlm store import cache system-prompt.pages --artifact smollm2.radixlm
    """
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
    from radixlm.runtime.errors import InvalidParameter
    from radixlm.runtime.server.http.api_keys import read_keys
    from radixlm.runtime.store import PageStore, StoreIdentity, import_bundle

    manifest = Artifact.open(take(CompileOptions, options).artifact_of(artifact, on_disk=True)).manifest
    api_keys = (None,) if api_key_file is None else read_keys(api_key_file)
    if len(api_keys) != 1:
        raise InvalidParameter(f"{api_key_file} has {len(api_keys)} API keys; give a file with one")
    scope = CacheScope(api_keys[0], cache_salt, prompt_cache_key)
    max_bytes = _ALL_OF_THE_DISK if store_gb is None else int(store_gb * 1e9)
    with PageStore.open(directory, StoreIdentity.of(manifest), max_bytes=max_bytes) as store:
        namespace = CacheNamespaces(ModelIdentity.of(manifest), store.secret).of(scope)
        report = import_bundle(store, bundle, namespace, evicts=store_gb is not None)
        num_evicted = store.stats().num_pages_evicted
    made_room = f", {num_evicted:,} others were evicted" if num_evicted else ""
    no_room = "; the disk has no room for more" if store_gb is None and report.num_stored < report.num_pages else ""
    click.echo(f"{report.num_stored:,} of {report.num_pages:,} pages are stored{made_room}{no_room}")


def _print_json(value: object) -> None:
    """Print a value as indented JSON."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


KEY_DIGITS = 12  # enough to name a page
_TEXT_LENGTH = 48


def title_of(model: StoredModel) -> str:
    """Return the line above a model's pages."""
    from radixlm.runtime.artifact.manifest import PAGE_SIZE

    identity, num_tokens = model.identity, len(model.pages) * PAGE_SIZE
    return (
        f"model {identity.model_digest[:KEY_DIGITS]}  {len(model.pages):,} pages, {num_tokens:,} tokens, "
        f"{model.num_bytes / 1e6:,.1f} MB in {len(model.segments)} segments"
    )


def name_of(namespace: bytes) -> str:
    """Return the name of a namespace in the output; if it is of a LoRA adapter, hashes of adapter and client."""
    from radixlm.runtime.cache.cache_namespace import adapted_digits

    digits = adapted_digits(namespace)
    if digits is None:
        return f"namespace {namespace.hex()[:KEY_DIGITS]}"
    return f"LoRA adapter {digits[1][:KEY_DIGITS]} of client {digits[0][:KEY_DIGITS]}"


def described_model(model: StoredModel) -> dict[str, Any]:
    """Return the description of a model, without its pages, for JSON."""
    identity = model.identity
    return {
        "model_digest": identity.model_digest,
        "tokenizer_digest": identity.tokenizer_digest,
        "page_bytes": identity.page_bytes,
        "num_pages": len(model.pages),
        "num_bytes": model.num_bytes,
        "num_segments": len(model.segments),
    }


def described_run(run: Run, text_of: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """Return the description of a run for JSON, with its text if `text_of` is given."""
    last, ids = run.pages[-1], [token for page in run.pages for token in page.token_ids]
    return {
        "key": last.key.hex(),
        "namespace": last.namespace.hex(),
        "num_tokens": len(ids),
        "num_tokens_from_start": (run.num_before + len(run.pages)) * len(last.token_ids),
        "text": None if text_of is None else text_of(ids),
    }


def line_of(run: dict[str, Any], depth: int) -> str:
    """Return the line for a run described by `described_run`, indented by the number of runs before it."""
    text = "" if run["text"] is None else "  " + repr(run["text"][:_TEXT_LENGTH])
    tokens = f"{run['num_tokens']:>7,} tokens, to {run['num_tokens_from_start']:>7,}"
    return f"{run['key'][:KEY_DIGITS]}  {tokens}  {'. ' * depth}{text}".rstrip()


def decoder_of(artifact: Path | None) -> Callable[[StoredModel], Callable[[Sequence[int]], str] | None]:
    """Return a function that returns the decoder of a stored model, or None if `artifact` is not that model."""
    if artifact is None:
        return lambda model: None
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.store import StoreIdentity
    from tokenizers import Tokenizer

    opened = Artifact.open(artifact)
    identity, tokenizer = StoreIdentity.of(opened.manifest), Tokenizer.from_str(opened.tokenizer_json)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return lambda model: decode if model.identity == identity else None
