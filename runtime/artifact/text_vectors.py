"""The part of a manifest that says how texts become vectors of hidden states, or scores of logits.

Knows values and their ranges, not models, tokenizers or vectors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .model_config.ranges import Strict

Pooling = Literal["last", "mean", "cls"]
"""Which hidden states make a text's vector: that of its last token, the mean of all, that of its first."""

_Id = Annotated[int, msgspec.Meta(ge=0, le=1 << 22)]
_Text = Annotated[str, msgspec.Meta(max_length=1 << 16)]


class EmbeddingInfo(Strict, frozen=True, kw_only=True):
    """The way an embedding model makes a vector of a text, from sentence-transformers' files or a GGUF file.

    Attributes:
        normalize: divide the vector by its length.
        prompts: what may be put before a text, by name, such as `query`.
        default_prompt: the name of the one that is put there where a request names none.
    """

    pooling: Pooling
    normalize: bool = True
    prompts: dict[str, _Text] = msgspec.field(default_factory=dict)
    default_prompt: str | None = None


class PairTemplate(Strict, frozen=True, kw_only=True):
    """The tokens that a reranker with a head gets before a query, between it and a document, and after that."""

    before: tuple[_Id, ...] = ()
    between: tuple[_Id, ...] = ()
    after: tuple[_Id, ...] = ()


class RerankingInfo(Strict, frozen=True, kw_only=True):
    """The score that a language model gives a document: `P(true) / (P(true) + P(false))` of the token after a prompt.

    Attributes:
        true_id, false_id: the two tokens, such as `yes` and `no`.
        template: the prompt, with `{instruction}`, `{query}` and `{document}` in it.
        instruction: what a relevant document is, where a request does not say it.
    """

    true_id: _Id
    false_id: _Id
    template: _Text
    instruction: _Text = ""
