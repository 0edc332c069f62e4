"""`radixlm inspect`: describe an artifact, or a model that could be compiled into one."""

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
@click.option("--verify", is_flag=True, help="Read every file of an artifact, and compare its digest.")
@click.option(
    "--draft",
    metavar="MODEL",
    help="Check that this model has the same tokens, so that it can draft for the artifact. It is compiled if it is "
    "not an artifact.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the manifest, or the description of a model, as JSON.")
@compile_options
def command(
    model: str, verify: bool, draft: str | None, as_json: bool, quantize: str | None, kv_dtype: str | None
) -> None:
    """Describe MODEL: an artifact, or a model to compile with the memory that it will need.

    Nothing is loaded, compiled or written, and of hf:ORG/NAME only the configuration is downloaded. The weights are not
    read: compile refuses damaged ones. The exit code is 2 if a model cannot be compiled.

    The commands generate, chat and serve run an artifact's model.so, which is native code. The digests show that its
    files are complete, not where they come from: open only artifacts from a source that you trust.

    \b
    radixlm inspect smollm2.radixlm --verify
    radixlm inspect model.Q4_K_M.gguf
    """
    from radixlm.runtime.artifact.compiled_models import artifact_named

    options = CompileOptions(quantize, kv_dtype)
    artifact = artifact_named(model)
    if artifact is not None:
        options.artifact_of(model, on_disk=True)  # refuses options for compiling
        drafter = None if draft is None else CompileOptions(None, None).artifact_of(draft, on_disk=True)
        _inspect_artifact(artifact, verify, drafter, as_json)
    elif verify or draft:
        option = "--verify" if verify else "--draft"
        raise ValueError(f"{option} is for artifacts, and {model} is not one; remove it")
    else:
        _inspect_source(model, options, as_json)


def _inspect_artifact(path: Path, verify: bool, draft: Path | None, as_json: bool) -> None:
    """Print the manifest of an artifact, as rows or JSON; with `verify`, check its files first."""
    import msgspec
    from radixlm.runtime.artifact import Artifact

    opened = Artifact.open(path)
    if verify:
        opened.verify()
    draft_row = None if draft is None else _draft_row(opened, Artifact.open(draft))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(opened.manifest)))
        return
    rows = list(_rows(opened.manifest))
    if (calibration := _calibration_row(opened)) is not None:
        rows.append(("calibration", calibration))
    if verify:
        rows.append(("digests", "all files match the manifest"))
    if draft_row is not None:
        rows.append(("draft", draft_row))
    print_rows(rows)


def _calibration_row(opened: Artifact) -> str | None:
    """Return the row about calibration for --kv-budget; None if the model or the installation does not support it."""
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
    """Return a line that names a draft model, and says how many tokens it shares with the artifact's model.

    Raises:
        InvalidParameter: it has different tokens.
    """
    from radixlm.runtime.chat.artifact_tokenizer import open_tokenizer
    from radixlm.runtime.speculation.same_tokens import require_same_tokens

    one, other = (open_tokenizer(each, None, time.monotonic) for each in (opened, draft))
    num_tokens = min(opened.manifest.model.vocab_size, one.vocab_size)
    name, num_known = draft.manifest.name, draft.manifest.model.vocab_size
    require_same_tokens(opened.manifest.name, one, name, other, num_tokens=num_tokens, num_known=num_known)
    return f"{name} has the same {num_tokens:,} tokens, and can draft"


def _inspect_source(model: str, options: CompileOptions, as_json: bool) -> None:
    """Print what is known of a model before it is compiled; exit with a code if it cannot be."""
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
    """Describe the token that the tokenizer makes of a space at the end of a prompt, if any."""
    suffix_ids = manifest.tokenizer.profile.get("suffix_ids")
    if not isinstance(suffix_ids, list | tuple) or not suffix_ids:
        return "none: a space at the end of a prompt does not become a token of its own"
    return (
        f"token {' or '.join(map(str, suffix_ids))}, a space at the end of a prompt: "
        "stripped before the prefill, and generated as part of the reply (--strip-suffix)"
    )


def _rows(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: names and values."""
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
    yield "KV cache", f"{kv.dtype}, {size(kv.page_bytes)} per page of {kv.page_size} tokens"
    if model.state_bytes:
        yield "states", f"{size(model.state_bytes)} for each running request and each cached state"
    if lora := manifest.lora:
        room = f"{lora.max_loras} of rank {lora.max_rank} at most, in {lora.dtype}"
        yield "LoRA adapters", f"room for {room}, {size(lora.adapter_bytes)} each"
    yield "code", "opening the artifact runs model.so in your process: open it only if you trust its source"
    yield "target", f"{target.name} ({target.mcpu}): {', '.join(target.features) or 'no special features'}"
    for name, info in sorted(manifest.files.items()):
        yield f"  {name}", f"{size(info.size)}, sha256 {info.sha256[:16]}…"


_LATER = "known after the download"


def source_rows(found: Inspection) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: names and values."""
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
    yield "KV cache", f"{found.kv_dtype}, {size(found.kv_bytes)} per 1,000 tokens"
    kept, stored = found.artifact_token_bytes, found.file_token_bytes
    read = _LATER if kept is None else token_bytes(kept, stored)
    yield "read per decoded token", f"{read}, and the KV of earlier tokens"
