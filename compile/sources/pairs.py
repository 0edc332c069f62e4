"""The tokens around the two texts of a pair, which a tokenizer's post-processor puts there, for rerankers with a head.

Knows tokenizers, and the separator in a model's configuration; not files.
"""

from __future__ import annotations

from msgspec.structs import replace
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.artifact.text_vectors import PairTemplate
from radixlm.runtime.errors import UnsupportedTokenizer
from tokenizers import Tokenizer

from .text_vectors import giving_hidden_states

_TEXT = "a"  # any text that has tokens


def scoring_pairs(label: str, config: ModelConfig, tokenizer_json: str) -> tuple[ModelConfig, PairTemplate]:
    """Return the model that scores pairs of texts, with their token types, and the tokens around them.

    Raises:
        UnsupportedTokenizer: the tokenizer makes pairs in another way.
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    pair = tokenizer.encode(_TEXT, _TEXT)
    ids, of_text, types = pair.ids, pair.sequence_ids, pair.type_ids
    if 0 not in of_text or 1 not in of_text or of_text.index(1) < of_text.index(0):
        raise UnsupportedTokenizer(f"{label}: the tokenizer does not put a query before a document; fetch it again")
    first, second = of_text.index(0), of_text.index(1)
    between, after = second - of_text[:second][::-1].index(0), len(ids) - of_text[::-1].index(1)
    template = PairTemplate(before=tuple(ids[:first]), between=tuple(ids[between:second]), after=tuple(ids[after:]))
    config = giving_hidden_states(config, score=config.score)
    entering = config.encoder_input
    if entering is None or not entering.token_type or not any(types):
        return config, template
    usual = [0] * (between + 1) + [1] * (len(ids) - between - 1)
    if not template.between or types != usual or template.between[0] in ids[:between]:
        raise UnsupportedTokenizer(
            f"{label}: the tokens of a pair have the types {types}; supported is 0 to the first separator, then 1"
        )
    return replace(config, encoder_input=replace(entering, separator_id=template.between[0])), template
