"""Write tests/data/tokenizers/tiny_spm.json: a SentencePiece-style tokenizer small enough to read.

It has what Llama-2's has: a Prepend normalizer, '▁' for spaces, byte fallback, a piece for '▁' alone; and a vocabulary
of a few words, each with and without the space before it. Run it again after changing it:

    python tests/tokenizer_fix/make_tiny_spm.py
"""

from __future__ import annotations

import json
from pathlib import Path

WORDS = (
    "the",
    "The",
    "capital",
    "of",
    "France",
    "is",
    "Paris",
    "And",
    "Italy",
    "Hello",
    "Hi",
    "[INST]",
    "[/INST]",
)
DESTINATION = Path(__file__).resolve().parent.parent / "data" / "tokenizers" / "tiny_spm.json"


def tiny_spm() -> dict[str, object]:
    """The document; ids: 0..2 special, 3..258 bytes, then characters, then what the merges make."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(0x21, 0x7F)), "é"]
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    for word in WORDS:
        merges["▁", word] = None
    merges["▁", "▁"] = None  # after the words, as in Llama-2: two spaces and a word are '▁', '▁word'
    pieces += [left + right for left, right in merges]
    assert len(pieces) == len(set(pieces))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    restore = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": n, "content": text, **flags, "special": True} for n, text in enumerate(special)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                restore,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: n for n, piece in enumerate(pieces)},
            "merges": [list(pair) for pair in merges],
        },
    }


if __name__ == "__main__":
    DESTINATION.write_text(json.dumps(tiny_spm(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
