"""Encode and decode text with a model's tokenizer, and undo what tokenizers change.

Pure Python over `tokenizers`; imports no other package of radixlm.
"""

from __future__ import annotations

from .appended_suffix import PreparedPrompt
from .errors import InvalidProfile, InvalidText, InvalidTokenId, InvalidTokenizer, TokenizerError, TooManyTokens
from .probe import profile_tokenizer
from .profile import AddedToken, TokenizerProfile
from .spelled_prompt import SpelledPrompt, is_mark
from .stream_decoder import StreamDecoder
from .tokenizer import Tokenizer

__all__ = [
    "AddedToken",
    "InvalidProfile",
    "InvalidText",
    "InvalidTokenId",
    "InvalidTokenizer",
    "PreparedPrompt",
    "SpelledPrompt",
    "StreamDecoder",
    "Tokenizer",
    "TokenizerError",
    "TokenizerProfile",
    "TooManyTokens",
    "is_mark",
    "profile_tokenizer",
]
