"""`radixlm generate`: continue a text without a chat template."""

from __future__ import annotations

import sys
from typing import Any

import click

from .field_flags import ENGINE, CompileOptions, FieldCommand, compile_options, engine_keywords, sampled, take


@click.command("generate", cls=FieldCommand, flags=(*ENGINE, "sampling"))
@click.argument("model")
@click.argument("prompt")
@compile_options
def command(model: str, prompt: str, **options: Any) -> None:
    """Continue PROMPT without a chat template. The PROMPT - is read from standard input.

    \b
    radixlm generate smollm2 "The capital of France is" --max-tokens 16 --temperature 0
    """
    from radixlm.runtime import Engine

    keywords = engine_keywords(options)
    artifact = take(CompileOptions, options).artifact_of(model)
    text = sys.stdin.read() if prompt == "-" else prompt
    with (
        Engine(artifact, **keywords) as engine,
        engine.stream(text, sampled(options, engine.default_params)) as stream,
    ):
        for delta in stream:
            click.echo(delta.text, nl=False)
        click.echo()
