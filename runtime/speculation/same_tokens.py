"""Whether two models spell with the same tokens, so that ids of one are ids of the other.

Knows tokenizers; not where a model comes from.
"""

from __future__ import annotations

import hashlib

from radixlm.tokenizer_fix import Tokenizer

from ..errors import InvalidParameter


def digest_of_tokens(tokenizer: Tokenizer, num_tokens: int) -> str:
    """A digest of the first ids, of their bytes, and of which of them are special."""
    digest, special_ids = hashlib.sha256(), tokenizer.profile.special_ids
    for token_id in range(min(num_tokens, tokenizer.vocab_size)):
        spelled = tokenizer.token_bytes(token_id)
        digest.update(f"{token_id} {len(spelled)} {int(token_id in special_ids)}\n".encode() + spelled)
    return digest.hexdigest()


def require_same_tokens(
    name: str, one: Tokenizer, draft_name: str, draft: Tokenizer, *, num_tokens: int, num_known: int
) -> None:
    """Do nothing where a draft's first ids spell what the model's do.

    Args:
        num_tokens: ids that the model may say.
        num_known: ids that the draft's model knows.

    Raises:
        InvalidParameter: they do not, or the draft does not know them all.
    """
    expected, found = digest_of_tokens(one, num_tokens), digest_of_tokens(draft, num_tokens)
    if expected != found:
        raise InvalidParameter(
            f"the draft {draft_name} has other tokens (digest {found[:12]}) than {name} ({expected[:12]}), so that its "
            f"guesses mean nothing there; choose a draft with the same tokenizer",
            param="draft",
        )
    if num_known < num_tokens:
        raise InvalidParameter(
            f"the draft {draft_name} knows {num_known} tokens, and {name} {num_tokens}; choose a draft of the "
            "same family",
            param="draft",
        )
