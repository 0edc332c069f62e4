"""`radixlm compile`: compile a model into an artifact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from radixlm.compile.compiler import CompileReport
    from radixlm.compile.in_memory import ProgressWriter
    from radixlm.compile.kv_layout import KVChoice
    from radixlm.compile.stored_weights import Quantize
    from radixlm.runtime.artifact.lora import LoraDType
    from radixlm.runtime.progress import Progress

    from .progress import ProgressDisplay


@click.command("compile")
@click.argument("source")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="NAME.radixlm",
    help="Path of the artifact, a directory.",
)
@click.option(
    "--quantize",
    type=click.Choice(["keep", "q4", "q8", "f16", "f32"]),
    default="keep",
    show_default=True,
    help="Quantization of the weights; keep: that of the source.",
)
@click.option(
    "--target",
    default="native",
    show_default=True,
    help="The CPU to compile for: native, x86-64-v3, x86-64-v4, armv8, armv8.2-dotprod, ...",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["auto", "f16", "f32", "k12v8"]),
    default="auto",
    show_default=True,
    help="Data type of the KV cache; k12v8: keys of 12 and values of 8 bits, 0.78 of f16's memory; auto: k12v8 if the "
    "target has AVX-512 VNNI, else f16.",
)
@click.option(
    "--context-length",
    type=click.IntRange(min=16),
    metavar="N",
    help="Maximum tokens of prompt and reply together.  [default: the model's own]",
)
@click.option("--name", help="Name of the model for clients.  [default: name of the output]")
@click.option(
    "--max-loras",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="LoRA adapters that the artifact has room for (serve --lora); 0: none.",
)
@click.option(
    "--max-lora-rank", type=click.IntRange(min=1), default=16, show_default=True, help="The largest rank of an adapter."
)
@click.option(
    "--lora-dtype",
    type=click.Choice(["f32", "f16", "bf16"]),
    default="f32",
    show_default=True,
    help="How to store adapters; f16 and bf16 take half the memory, and round adapters that are stored in float32.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and no progress.")
@click.option(
    "--in-memory",
    type=(
        click.Path(path_type=Path),
        int,
        int,
        int,
        click.Path(path_type=Path),
    ),  # arguments of `InMemory` and of `keep`
    hidden=True,
)
@click.option("--for-chat", is_flag=True, hidden=True)  # refuse a model without a chat template
@click.option("--cached", is_flag=True, hidden=True)  # say that the output is in the cache, once the source is read
def command(
    source: str,
    output: Path,
    quantize: Quantize,
    target: str,
    kv_dtype: KVChoice,
    context_length: int | None,
    name: str | None,
    max_loras: int,
    max_lora_rank: int,
    lora_dtype: LoraDType,
    as_json: bool,
    in_memory: tuple[Path, int, int, int, Path] | None,
    for_chat: bool,
    cached: bool,
) -> None:
    """Compile SOURCE into an artifact.

    SOURCE is a .gguf file, a Hugging Face directory, hf:ORG/NAME, or the alias smollm2. The logits of the compiled
    model are compared with a NumPy evaluation of the same weights, and the artifact is published only if both agree.

    \b
    radixlm compile smollm2 -o smollm2.radixlm
    radixlm compile model.Q4_K_M.gguf -o model.radixlm --target x86-64-v3
    radixlm compile ./Qwen2.5-0.5B -o qwen.radixlm --quantize q4
    """
    from radixlm.compile.in_memory import WRITTEN, InMemory, ProgressWriter, keep, tell
    from radixlm.compile.preflight import check_ready, read_ahead

    from .progress import ProgressDisplay

    place = None if in_memory is None else InMemory(*in_memory[:3], written=partial(tell, in_memory[3], WRITTEN))
    check_ready(source, output, quantize, needs_space=place is None)
    read_ahead(Path(source))
    with ExitStack() as stack:
        with nullcontext() if as_json else ProgressDisplay(sys.stderr) as display:
            from radixlm.compile.compiler import (
                CompileOptions,
                fresh_artifact,
            )  # takes a second, while the display runs

            options = CompileOptions(
                quantize, target, kv_dtype, context_length, name, max_loras, max_lora_rank, lora_dtype
            )
            progress = display if in_memory is None else _both(display, ProgressWriter(in_memory[3]))
            fresh = stack.enter_context(
                fresh_artifact(
                    source,
                    output,
                    options,
                    progress=progress,
                    opened=partial(_say_cached, display, source, output) if cached else None,
                    in_memory=place,
                    for_chat=for_chat,
                )
            )
            report = fresh.report if fresh.is_in_memory else fresh.publish()
        _tell(report, quantize, as_json=as_json)
        if place is not None and in_memory is not None and fresh.is_in_memory:
            keep(place, output, fresh.check_weights, status_fd=in_memory[3], lock=in_memory[4])


def _say_cached(display: ProgressDisplay | None, source: str, output: Path) -> None:
    """Say above the progress that the source is compiled, and where it will be cached."""
    if display is not None:
        display.say(f"compiling {source}, once; it will be cached in {output}")


def _both(display: ProgressDisplay | None, teller: ProgressWriter) -> Callable[[Progress], None]:
    """Return a function that reports progress to the writer, and to the display if there is one."""

    def report(progress: Progress) -> None:
        teller(progress)
        if display is not None:
            display(progress)

    return report


def _tell(report: CompileReport, quantize: Quantize, *, as_json: bool) -> None:
    """Print what was compiled: as JSON, or warnings and the next command."""
    import msgspec

    if as_json:
        click.echo(msgspec.json.encode(report, enc_hook=str))
        return
    if report.template_fault is not None and report.manifest.writes_text:
        click.secho(f"The model supports completions, but not chats: {report.template_fault}", err=True)
    if quantize == "keep":  # for other quantizations, `inspect` shows the errors
        for tensor in report.rounded:
            change = f"{tensor.name} ({tensor.type}) is rounded to {tensor.kind}"
            click.secho(f"{change}: relative error {tensor.relative_error:.2g}", err=True)
    use = "chat" if report.template_fault is None else "serve"
    click.echo(f"{report.path} is ready: radixlm {use} {report.path}")
