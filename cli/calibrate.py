"""`radixlm calibrate`: measure how much of a prefix's KV a model needs, for approximate KV loading."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .field_flags import CompileOptions, compile_options, take
from .tables import print_rows

if TYPE_CHECKING:
    from radixlm.runtime.extras.approximate.calibration.calibration import Calibration


@click.command("calibrate")
@click.argument("model")
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="A text of 2,000 words or more, similar to later prompts.  [default: scenes of Shakespeare]",
)
@click.option("--threads", type=click.IntRange(min=1), help="Number of threads.")
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON, and no progress.")
@compile_options
def command(model: str, text: Path | None, threads: int | None, as_json: bool, **options: Any) -> None:
    """Calibrate MODEL for approximate KV loading, which serve --kv-budget requires.

    Inserts facts into a text and asks for them, with all KV rows and with shares of them. This takes a minute for a
    small model. The result is written to calibration.json in the artifact, and takes effect when the artifact is opened
    the next time.

    \b
    radixlm calibrate smollm2.radixlm
    radixlm serve smollm2.radixlm --store cache --kv-budget 1
    """
    import msgspec
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.chat.artifact_tokenizer import open_tokenizer
    from radixlm.runtime.optional import APPROXIMATE, required

    required(APPROXIMATE, "calibrate")
    from radixlm.runtime.extras.approximate.calibration.calibrate import calibrate, checked, pages_needed
    from radixlm.runtime.extras.approximate.calibration.measured_prefix import cases, shipped_text
    from radixlm.runtime.model.model_runner import ModelRunner

    artifact = Artifact.open(take(CompileOptions, options).artifact_of(model, on_disk=True))
    checked(artifact.manifest)
    tokenizer = open_tokenizer(artifact, None, time.monotonic)
    given = shipped_text() if text is None else text.read_text(encoding="utf-8")
    first_ids = tokenizer.encode("")
    asked = cases(given, tokenizer.encode_inside, first_ids=first_ids, context_length=artifact.manifest.context_length)
    runner = ModelRunner(artifact, num_pages=pages_needed(asked), num_threads=threads, keep_scores=True)
    with (
        closing(runner),
        click.progressbar(length=1000, label="calibrating", file=sys.stderr, hidden=as_json) as bar,
    ):
        found = calibrate(artifact, runner, asked, progress=lambda done: bar.update(int(1000 * done) - bar.pos))
    path = found.write(artifact.path)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        print_rows([*calibration_rows(found), ("kept in", str(path))])


def calibration_rows(found: Calibration) -> list[tuple[str, str]]:
    """Return the rows of the table: names and values."""
    heads = ", ".join(f"head {head} {kl:.3f}" for head, kl in found.head_kl.items())
    rows = [
        ("probe head", f"{found.probe_head} (KL in nats a token at a quarter of the rows: {heads or 'not measured'})"),
        ("dropped attention", f"at most {found.max_dropped_attention:.3f}; above that, all rows are loaded"),
    ]
    rows += [
        (f"  {loss.budget:.0%} of the rows", f"KL {loss.kl:.3f}, {loss.num_found} of {found.num_facts} facts found")
        for loss in found.losses
    ]
    advice = "none of these shares: do not use --kv-budget" if found.least_budget == 1.0 else f"{found.least_budget:g}"
    return [*rows, ("least budget", f"{advice}, among the tested shares")]
