"""A model's tokenizer in the form that the grammar library expects.

Knows bytes and ids: which tokens are text, which end a reply, and how a forced text is tokenized.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.tokenizer_fix import Tokenizer, TokenizerError

from .grammar_trial_process import TokenBytes
from .grammars import Grammars


class GrammarVocabulary(TokenBytes):
    """The tokens that a model may write. A grammar never allows special tokens, except those that end a reply.

    Args:
        vocab_size: number of tokens that can be sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        special_ids = tokenizer.profile.special_ids | frozenset(eos_token_ids)
        super().__init__(
            [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            sorted(token_id for token_id in special_ids if token_id < vocab_size),
            eos_token_ids[0],
        )
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def __call__(self, text: str) -> list[int]:
        """Return the tokenizer's ids of a text that is the only possible continuation.

        They spell exactly this text. Some tokenizers normalize it; then the ids are those of its bytes.
        """
        try:
            ids = self._tokenizer.encode_inside(text)
        except TokenizerError:
            return super().__call__(text)
        is_exact = all(token_id < self._vocab_size for token_id in ids)
        is_exact = is_exact and b"".join(map(self._tokenizer.token_bytes, ids)) == text.encode()
        return ids if is_exact else super().__call__(text)


def open_grammars(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Return the grammars of a model that samples from `vocab_size` tokens; loads its vocabulary with the first one."""
    return Grammars(
        lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids), eos_token_ids
    )
