"""`radixlm generate`: a prompt is continued as it is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from .options import engine_options, sampling_options, store_options, take


@click.command("generate")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("prompt")
@store_options
@engine_options
@sampling_options
def command(artifact: Path, prompt: str, **options: Any) -> None:
    """Continue PROMPT, without a chat template; a PROMPT of - is read from standard input.

    \b
    radixlm generate smollm2.radixlm "The capital of France is" --max-tokens 16 --temperature 0
    """
    engine_wishes, sampling_wishes = take(options)
    text = sys.stdin.read() if prompt == "-" else prompt
    with (
        engine_wishes.open(artifact) as engine,
        engine.stream(text, sampling_wishes.params(engine.default_params)) as stream,
    ):
        for delta in stream:
            click.echo(delta.text, nl=False)
        click.echo()
