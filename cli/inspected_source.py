"""Tell what a model source is and what it will take, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .tables import conversations, layer_rows, sampling, size, token_bytes

if TYPE_CHECKING:
    from radixlm.compile.inspection import Inspection

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
    yield "conversations", _LATER if has_template is None else conversations(has_template)
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
