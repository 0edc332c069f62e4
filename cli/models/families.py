"""`radixlm models`: list the supported model families and formats, with their verification."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..tables import print_rows

if TYPE_CHECKING:
    from radixlm.compile.evidence import FamilyEvidence


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="Print the lists as JSON.")
def command(as_json: bool) -> None:
    """List the model families and file formats that compile supports, and what each was verified against.

    A golden is a tiny random checkpoint with all features of its family, with logits computed by transformers. Tests
    compare a compiled model with it, and also with llama.cpp on the same weights. "keeps" is the quantization that
    compile uses without --quantize.

    \b
    radixlm models
    radixlm models --json | jq '.families[].classes'
    """
    import msgspec
    from radixlm.compile.evidence import FORMATS, families

    found = families()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"families": found, "formats": FORMATS})))
        return
    for family in found:
        click.secho(family.title, bold=True)
        print_rows(
            [
                ("  classes", ", ".join(family.classes)),
                ("  GGUF", ", ".join(family.gguf) or f"as {', '.join(family.gguf_of_others)}"),
                ("  verified", _verified(family)),
            ]
        )
        for golden in family.goldens:
            if golden.needs is not None:
                click.echo(f"  not compiled yet: {golden.name} needs {golden.needs}")
    for each in FORMATS:
        click.secho(each.title, bold=True)
        print_rows([("  reads", each.reads), ("  keeps", each.kept), ("  verified", f"against {each.verified}")])


def _verified(family: FamilyEvidence) -> str:
    """Return, as one line, what a family was verified against: transformers, llama.cpp, real models."""
    if not family.goldens:
        return "no golden"
    text = f"transformers ({', '.join(golden.name for golden in family.goldens)})"
    if family.llama_cpp is not None:
        without = " and ".join(family.without_llama_cpp)
        text += f", llama.cpp within {family.llama_cpp:.0e}{f' (not compared: {without})' if without else ''}"
    return text if family.real is None else f"{text}, {family.real}"
