"""The texts that perplexity is measured on, as a model's token ids.

Knows the files in the folder of real inputs, which the repository may not carry (`RADIXLM_DATA`, ../shared/data).
"""

from __future__ import annotations

import os
from pathlib import Path

from tokenizers import Tokenizer

NUM_SHAKESPEARE_TOKENS = 20_000
_HEADER = "-----\n"  # above it, each BBH file holds a warning against training on it


def data_dir() -> Path:
    path = Path(os.environ.get("RADIXLM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not path.is_dir():
        raise SystemExit(f"the texts are not at {path}; set RADIXLM_DATA to the folder that holds prompts/")
    return path


def texts(tokenizer: Tokenizer) -> dict[str, list[list[int]]]:
    """By name, the token ids of one or more documents, without special tokens.

    `tinyshakespeare`: the first 20,000 tokens. `bbh`: the few-shot prompts, each a document.
    """
    prompts = data_dir() / "prompts"
    shakespeare = _encode(tokenizer, (prompts / "tinyshakespeare.txt").read_text(encoding="utf-8"))
    bbh = [path.read_text(encoding="utf-8") for path in sorted((prompts / "bbh_cot").glob("*.txt"))]
    return {
        "tinyshakespeare": [shakespeare[:NUM_SHAKESPEARE_TOKENS]],
        "bbh": [_encode(tokenizer, text.partition(_HEADER)[2]) for text in bbh],
    }


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids
