"""`radixlm generate`: a prompt is continued as it is written."""

from __future__ import annotations

import sys
from typing import Any

import click

from .options import CompileOptions, EngineOptions, compile_options, engine_options, guess_options, store_options, take
from .sampling_options import SamplingOptions, sampling_options


@click.command("generate")
@click.argument("model")
@click.argument("prompt")
@compile_options
@store_options
@guess_options
@engine_options
@sampling_options
def command(model: str, prompt: str, **options: Any) -> None:
    """Continue PROMPT, without a chat template; a PROMPT of - is read from standard input.

    MODEL is an artifact, or what compile takes, which is compiled once and kept in the cache folder.

    \b
    radixlm generate smollm2 "The capital of France is" --max-tokens 16 --temperature 0
    """
    artifact = take(CompileOptions, options).artifact_of(model)
    sampling_wishes = take(SamplingOptions, options)
    text = sys.stdin.read() if prompt == "-" else prompt
    with (
        take(EngineOptions, options).open(artifact) as engine,
        engine.stream(text, sampling_wishes.params(engine.default_params)) as stream,
    ):
        for delta in stream:
            click.echo(delta.text, nl=False)
        click.echo()
