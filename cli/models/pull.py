"""`radixlm pull`: download a model and compile it, so that it starts quickly and without a network."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..field_flags import CompileOptions, compile_options, take


@click.command("pull")
@click.argument("model")
@click.option("--download-only", is_flag=True, help="Download MODEL, but compile it only when it is used.")
@compile_options
def command(model: str, download_only: bool, **options: Any) -> None:
    """Download MODEL, compile it, and print the artifact's path.

    A model of the Hugging Face hub is hf:ORG/NAME; for a repository of GGUF files, add the quantization or the file. An
    interrupted download is resumed, and its sha256 is compared with the hub's. HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE
    are respected.

    \b
    radixlm pull hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M
    radixlm run hf:Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q4_K_M
    """
    compiling = take(CompileOptions, options)
    if not download_only:
        click.echo(compiling.artifact_of(model, on_disk=True))
        return
    from radixlm.compile.sources import download

    with click.progressbar(length=0, label=f"downloading {model}", file=sys.stderr) as bar:

        def progressed(done: int, total: int) -> None:
            bar.length = total
            bar.update(done - bar.pos)

        path = download(model, progress=progressed)
    click.echo(path)
