"""`radixlm inspect`: what is in an artifact, or what an artifact of a model would take."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .field_flags import CompileOptions, compile_options
from .tables import conversations, layer_rows, print_rows, sampling, size, token_bytes, vector_rows

if TYPE_CHECKING:
    from radixlm.compile.inspection import Inspection
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.artifact.manifest import Manifest

EXIT_CANNOT_BE_COMPILED = 2


@click.command("inspect")
@click.argument("model")
@click.option("--verify", is_flag=True, help="Read every file of an artifact and compare its digest.")
@click.option(
    "--draft",
    metavar="MODEL",
    help="Say whether this model has the same tokens, so that it can draft for the artifact: an error if not. It is "
    "compiled if it is no artifact.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or what was found, as JSON.")
@compile_options
def command(
    model: str, verify: bool, draft: str | None, as_json: bool, quantize: str | None, kv_dtype: str | None
) -> None:
    """Show what is in MODEL, an artifact; or of what compile takes, whether it can be compiled and what it will take.

    Nothing is loaded, built or written, and of hf:ORG/NAME only the configuration is fetched. The numbers of weights
    are not looked at: compile refuses those that are damaged. The exit code is 2 where a model cannot be compiled.

    The commands generate, chat and serve run an artifact's model.so, which is native code. The digests show that the
    files are complete, not where they come from: open only an artifact from a source that you trust.

    \b
    radixlm inspect smollm2.radixlm --verify
    radixlm inspect model.Q4_K_M.gguf
    """
    from radixlm.runtime.artifact.model_names import is_artifact

    options = CompileOptions(quantize, kv_dtype)
    if is_artifact(model):
        options.artifact_of(model, on_disk=True)  # refuses what is for compiling
        drafter = None if draft is None else CompileOptions(None, None).artifact_of(draft, on_disk=True)
        _inspect_artifact(Path(model), verify, drafter, as_json)
    elif verify or draft:
        option = "--verify" if verify else "--draft"
        raise ValueError(f"{option} is of artifacts, and {model} is none; leave it out")
    else:
        _inspect_source(model, options, as_json)


def _inspect_artifact(path: Path, verify: bool, draft: Path | None, as_json: bool) -> None:
    import msgspec
    from radixlm.runtime.artifact import Artifact

    opened = Artifact.open(path)
    if verify:
        opened.verify()
    guesses = None if draft is None else _draft_row(opened, Artifact.open(draft))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(opened.manifest)))
        return
    rows = list(_rows(opened.manifest))
    if (calibration := _calibration_row(opened)) is not None:
        rows.append(("calibration", calibration))
    if verify:
        rows.append(("digests", "all files are those that the manifest describes"))
    if guesses is not None:
        rows.append(("draft", guesses))
    print_rows(rows)


def _calibration_row(opened: Artifact) -> str | None:
    """Whether --kv-budget may be given; None where the model or what is installed allows none."""
    from radixlm.runtime.errors import InvalidParameter
    from radixlm.runtime.optional import APPROXIMATE, find

    if find(APPROXIMATE) is None:
        return None
    from radixlm.runtime.extras.approximate.calibration.calibration import NAME, Calibration

    if opened.manifest.model.why_not_partial is not None:
        return None
    try:
        found = Calibration.read(opened.path, opened.manifest)
    except InvalidParameter as error:
        return str(error) if (opened.path / NAME).exists() else f"none; run: radixlm calibrate {opened.path}"
    bound = f"at most {found.max_dropped_attention:.3f} of the attention dropped"
    return f"probe head {found.probe_head}, {bound}; --kv-budget {found.least_budget:g} or more"


def _draft_row(opened: Artifact, draft: Artifact) -> str:
    """Describe a draft model that fits an artifact's model.

    Raises:
        InvalidParameter: it has other tokens.
    """
    from radixlm.runtime.chat.artifact_tokenizer import open_tokenizer
    from radixlm.runtime.speculation.same_tokens import require_same_tokens

    one, other = (open_tokenizer(each, None, time.monotonic) for each in (opened, draft))
    num_tokens = min(opened.manifest.model.vocab_size, one.vocab_size)
    name, num_known = draft.manifest.name, draft.manifest.model.vocab_size
    require_same_tokens(opened.manifest.name, one, name, other, num_tokens=num_tokens, num_known=num_known)
    return f"{name} has the same {num_tokens:,} tokens, and can draft"


def _inspect_source(model: str, options: CompileOptions, as_json: bool) -> None:
    import msgspec
    from radixlm.compile.inspection import inspect_source

    given = {name: value for name, value in vars(options).items() if value is not None}
    found = inspect_source(model, **given)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
    else:
        print_rows(source_rows(found))
    if found.refusal is not None:
        sys.exit(EXIT_CANNOT_BE_COMPILED)


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
    from radixlm.runtime.artifact import CHAT_TEMPLATE

    model, kv, target = manifest.model, manifest.kv, manifest.target
    yield "name", manifest.name
    yield "source", f"{manifest.source.format} {manifest.source.name}"
    yield "architecture", model.architecture
    yield from layer_rows(model)
    yield from vector_rows(manifest)
    yield "conversations", conversations(CHAT_TEMPLATE in manifest.files, writes=model.output == "logits")
    yield "sampling", sampling(manifest.sampling)
    yield "appended suffix", appended_suffix(manifest)
    yield "context", f"{manifest.context_length:,} tokens"
    yield "quantization", manifest.quantization.mode
    for name, kind in manifest.quantization.kinds.items():
        exact = "exact" if kind.relative_error == 0.0 else f"relative error {kind.relative_error:.2%}"
        sources = ", ".join(kind.source)
        yield f"  {name}", f"{kind.count} tensors, {size(kind.bytes)}, from {sources}, {exact}"
    quantization = manifest.quantization
    if quantization.token_bytes is not None:
        yield "read per decoded token", token_bytes(quantization.token_bytes, quantization.source_token_bytes)
    yield "keys and values", f"{kv.dtype}, {size(kv.page_bytes)} per page of {kv.page_size} tokens"
    if model.state_bytes:
        yield "states", f"{size(model.state_bytes)} for each running request and each snapshot of a prefix"
    yield "code", "opening the artifact runs model.so in your process: open it only if you trust where it comes from"
    yield "target", f"{target.name} ({target.mcpu}): {', '.join(target.features) or 'no special features'}"
    for name, info in sorted(manifest.files.items()):
        yield f"  {name}", f"{size(info.size)}, sha256 {info.sha256[:16]}…"


_LATER = "known when it is downloaded"


def source_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Names and values of the table, in reading order."""
    yield "source", f"{found.format} {found.source}"
    yield "family", found.family
    yield "architecture", found.model.architecture
    yield "can be compiled", "yes" if found.refusal is None else f"no: {found.refusal}"
    yield from layer_rows(found.model)
    yield "parameters", f"{found.num_parameters:,}"
    if found.context_length is not None:
        trained = found.model.max_position_embeddings
        less = "" if trained == found.context_length else f", of {trained:,} that it was trained for"
        yield "context", f"{found.context_length:,} tokens{less}"
    yield "tokenizer", found.tokenizer or _LATER
    has_template = found.has_chat_template
    yield (
        "conversations",
        (_LATER if has_template is None else conversations(has_template, writes=found.model.output == "logits")),
    )
    yield "sampling", sampling(found.sampling)
    yield "file", _LATER if found.file_bytes is None else size(found.file_bytes)
    if found.artifact_bytes is None:
        yield "artifact", _LATER
    else:
        yield "artifact", f"{size(found.artifact_bytes)} of weights, on disk and in memory"
    yield "keys and values", f"{found.kv_dtype}, {size(found.kv_bytes)} per 1,000 tokens"
    kept, stored = found.artifact_token_bytes, found.file_token_bytes
    read = _LATER if kept is None else token_bytes(kept, stored)
    yield "read per decoded token", f"{read}, and the keys and values before it"
