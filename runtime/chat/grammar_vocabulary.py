"""A model's tokenizer as the grammar library wants to know it.

Knows bytes and ids: which tokens are text, which end a reply, and how a forced text is cut in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.tokenizer_fix import Tokenizer, TokenizerError

from .grammar_trial_process import Vocabulary


class GrammarVocabulary(Vocabulary):
    """The tokens that a model may say. Special ones are no text: a grammar never allows them, but for those that end a
    reply where it may end.

    Args:
        vocab_size: of what is sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        special_ids = tokenizer.profile.special_ids | frozenset(eos_token_ids)
        super().__init__(
            [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)],
            sorted(token_id for token_id in special_ids if token_id < vocab_size),
            eos_token_ids[0],
        )
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """The ids that a text is best said with where it is the only one that may come.

        They spell exactly the text, which is more than a tokenizer promises: some normalize it.
        """
        try:
            ids = self._tokenizer.encode_inside(text)
        except TokenizerError:
            return super().__call__(text)
        is_exact = all(token_id < len(self.tokens) for token_id in ids)
        is_exact = is_exact and b"".join(self.tokens[token_id] for token_id in ids) == text.encode()
        return ids if is_exact else super().__call__(text)
