"""`radixlm verify-bits`: print a digest of logits, to compare machines."""

from __future__ import annotations

from typing import Any

import click

from .field_flags import CompileOptions, compile_options, take
from .tables import print_rows


@click.command("verify-bits")
@click.argument("model")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Number of tokens, at most the context length.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads; the digest does not depend on it.")
@click.option("--json", "as_json", is_flag=True, help="Print all rows as JSON.")
@compile_options
def command(model: str, tokens: int, threads: int | None, as_json: bool, **options: Any) -> None:
    """Print a digest of MODEL's logits for a fixed sequence of token ids.

    Two machines that compute the same bits print the same digest. They must do so, whatever their CPUs, if the rows
    "class", "weights", "KV" and "logits" agree: compile the same source with the same options on both.

    \b
    radixlm verify-bits smollm2.radixlm
    radixlm verify-bits smollm2.radixlm --tokens 64 --json
    """
    import msgspec
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.model.logits_digest import logits_digest

    artifact = Artifact.open(take(CompileOptions, options).artifact_of(model, on_disk=True))
    found = logits_digest(artifact, num_tokens=tokens, num_threads=threads)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    print_rows(
        [
            ("class", found.numeric_class),
            ("target", found.target),
            ("weights", f"sha256 {found.weights}"),
            ("KV", found.kv_dtype),
            ("logits", f"{found.num_tokens:,} tokens x {found.vocab_size:,}"),
            ("digest", f"sha256 {found.sha256}"),
        ]
    )
