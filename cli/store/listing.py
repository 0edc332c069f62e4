"""Stored models and runs of pages, in words and as values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixlm.runtime.store.catalogue import Run, StoredModel

KEY_DIGITS = 12  # enough to name a page
_TEXT_LENGTH = 48


def title_of(model: StoredModel) -> str:
    """A line over what a model has."""
    from radixlm.runtime.artifact.manifest import PAGE_SIZE

    identity, num_tokens = model.identity, len(model.pages) * PAGE_SIZE
    return (
        f"model {identity.model_digest[:KEY_DIGITS]}  {len(model.pages):,} pages, {num_tokens:,} tokens, "
        f"{model.num_bytes / 1e6:,.1f} MB in {len(model.segments)} segments"
    )


def described_model(model: StoredModel) -> dict[str, Any]:
    """A model without its pages."""
    identity = model.identity
    return {
        "model_digest": identity.model_digest,
        "tokenizer_digest": identity.tokenizer_digest,
        "page_bytes": identity.page_bytes,
        "num_pages": len(model.pages),
        "num_bytes": model.num_bytes,
        "num_segments": len(model.segments),
    }


def described_run(run: Run, text_of: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """A run, with its whole text where `text_of` makes one."""
    last, ids = run.pages[-1], [token for page in run.pages for token in page.token_ids]
    return {
        "key": last.key.hex(),
        "namespace": last.namespace.hex(),
        "num_tokens": len(ids),
        "num_tokens_from_start": (run.num_before + len(run.pages)) * len(last.token_ids),
        "text": None if text_of is None else text_of(ids),
    }


def line_of(run: dict[str, Any], depth: int) -> str:
    """A line for what `described_run` made, with a dot for each run before it."""
    text = "" if run["text"] is None else "  " + repr(run["text"][:_TEXT_LENGTH])
    tokens = f"{run['num_tokens']:>7,} tokens, to {run['num_tokens_from_start']:>7,}"
    return f"{run['key'][:KEY_DIGITS]}  {tokens}  {'. ' * depth}{text}".rstrip()


def decoder_of(artifact: Path | None) -> Callable[[StoredModel], Callable[[Sequence[int]], str] | None]:
    """For a model the function that makes text of ids, if `artifact` is that model."""
    if artifact is None:
        return lambda model: None
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.store import StoreIdentity
    from tokenizers import Tokenizer

    opened = Artifact.open(artifact)
    identity, tokenizer = StoreIdentity.of(opened.manifest), Tokenizer.from_str(opened.tokenizer_json)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    return lambda model: decode if model.identity == identity else None
