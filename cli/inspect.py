"""`radixlm inspect`: what is in an artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from radixlm.runtime.artifact.manifest import Manifest


@click.command("inspect")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every file and compare its digest.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def command(artifact: Path, verify: bool, as_json: bool) -> None:
    """Show what is in ARTIFACT; the model is not loaded.

    The commands generate, chat and serve run its model.so, which is native code. The digests show that the files are
    complete, not where they come from: open only an artifact from a source that you trust.

    \b
    radixlm inspect smollm2.radixlm --verify
    """
    import msgspec
    from radixlm.runtime.artifact import Artifact

    opened = Artifact.open(artifact)
    if verify:
        opened.verify()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(opened.manifest)))
        return
    rows = list(_rows(opened.manifest))
    if verify:
        rows.append(("digests", "all files are those that the manifest describes"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}".rstrip())


def appended_suffix(manifest: Manifest) -> str:
    """Which token the tokenizer makes of a lone space at a prompt's end, and what is done about it."""
    suffix_ids = manifest.tokenizer.profile.get("suffix_ids")
    if not isinstance(suffix_ids, list | tuple) or not suffix_ids:
        return "none: a lone space at the end of a prompt becomes no token of its own"
    return (
        f"token {' or '.join(map(str, suffix_ids))}, a lone space at the end of a prompt: "
        "stripped before the prefill, and the reply brings it back (--strip-suffix)"
    )


def _rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Names and values of the table, in reading order."""
    model, kv, target = manifest.model, manifest.kv, manifest.target
    yield "name", manifest.name
    yield "source", f"{manifest.source.format} {manifest.source.name}"
    yield "architecture", model.architecture
    yield (
        "layers",
        f"{model.num_hidden_layers} of {model.hidden_size}, feed-forward {model.intermediate_size}",
    )
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    yield "heads", f"{heads} of {model.head_dim}, {kv_heads} for keys and values"
    yield "vocabulary", f"{model.vocab_size:,}"
    yield "appended suffix", appended_suffix(manifest)
    yield "context", f"{manifest.context_length:,} tokens"
    yield "quantization", manifest.quantization.mode
    for name, kind in manifest.quantization.kinds.items():
        exact = "exact" if kind.relative_error == 0.0 else f"relative error {kind.relative_error:.2%}"
        sources = ", ".join(kind.source)
        yield f"  {name}", f"{kind.count} tensors, {_size(kind.bytes)}, from {sources}, {exact}"
    yield "keys and values", f"{kv.dtype}, {_size(kv.page_bytes)} per page of {kv.page_size} tokens"
    yield "code", "opening the artifact runs model.so in your process: open it only if you trust where it comes from"
    yield "target", f"{target.name} ({target.mcpu}): {', '.join(target.features) or 'no special features'}"
    for name, info in sorted(manifest.files.items()):
        yield f"  {name}", f"{_size(info.size)}, sha256 {info.sha256[:16]}…"


def _size(num_bytes: int) -> str:
    """
    >>> _size(98_362_432), _size(512)
    ('98.4 MB', '512 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes} B"
