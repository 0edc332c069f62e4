"""Check that two models have the same vocabulary, so that token ids of one are valid for the other.

Knows tokenizers; not where a model comes from.
"""

from __future__ import annotations

import hashlib

from radixlm.tokenizer_fix import Tokenizer

from ..errors import InvalidParameter


def digest_of_tokens(tokenizer: Tokenizer, num_tokens: int) -> str:
    """Return a digest of the first `num_tokens` ids: their bytes, and whether each is special."""
    digest, special_ids = hashlib.sha256(), tokenizer.profile.special_ids
    for token_id in range(min(num_tokens, tokenizer.vocab_size)):
        spelled = tokenizer.token_bytes(token_id)
        digest.update(f"{token_id} {len(spelled)} {int(token_id in special_ids)}\n".encode() + spelled)
    return digest.hexdigest()


def require_same_tokens(
    name: str, one: Tokenizer, draft_name: str, draft: Tokenizer, *, num_tokens: int, num_known: int
) -> None:
    """Raise unless the first ids of a draft model spell the same as the model's.

    Args:
        num_tokens: number of ids that the model can generate.
        num_known: number of ids that the draft model knows.

    Raises:
        InvalidParameter: they differ, or the draft model does not know all of them.
    """
    expected, found = digest_of_tokens(one, num_tokens), digest_of_tokens(draft, num_tokens)
    if expected != found:
        raise InvalidParameter(
            f"the draft {draft_name} has other tokens (digest {found[:12]}) than {name} ({expected[:12]}), so that its "
            f"draft tokens mean nothing there; choose a draft with the same tokenizer",
            param="draft",
        )
    if num_known < num_tokens:
        raise InvalidParameter(
            f"the draft {draft_name} knows {num_known} tokens, and {name} {num_tokens}; choose a draft of the "
            "same family",
            param="draft",
        )
