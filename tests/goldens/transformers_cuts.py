"""Make `transformers_cuts.json`: where transformers cuts the texts of `pre_tokens.json`, by `tokenizer.ggml.pre`.

    python -m tests.goldens.transformers_cuts

Run by `make goldens`. Of each way there is the number of bytes of each word, which no vocabulary moves. Ways are those
that transformers has in its code: of classes of models, of its converter for Llama 3, and of its own reader of GGUF
files. Other makers tell theirs only in files of their models.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import CohereTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, set_split_regex
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "transformers_cuts.json"
CLASSES = {
    GPT2Tokenizer: ["gpt-2"],
    Qwen2Tokenizer: ["qwen2"],
    Qwen3_5Tokenizer: ["qwen35"],
    CohereTokenizer: ["command-r", "smollm"],  # single digits, then GPT-2's words, as SmolLM's own file has it, too
}


class Llama3(TikTokenConverter):  # type: ignore[misc]
    """The converter with the pattern that it has for Llama 3, and no vocabulary."""

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(models.BPE())


def lengths(tokenizer: Tokenizer) -> list[list[int]]:
    """The bytes of each word of each text."""
    found = []
    for text in json.loads((HERE / "pre_tokens.json").read_text("utf-8"))["texts"]:
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        found.append([len(word) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)])
    return found


def main() -> None:
    ways = [(kind.__name__, same, kind().backend_tokenizer) for kind, same in CLASSES.items()]
    ways.append(("TikTokenConverter", ["llama-bpe"], Llama3().converted()))
    names = defaultdict(list)
    for name, split in GGUF_PRE_TOKENIZER_SPLITS.items():
        names[split].append(name)
    for same in names.values():
        of_gguf = set_split_regex(GPT2Tokenizer(), {"pre_tokenizer_type": same[0]}).backend_tokenizer
        ways.append(("GGUF_PRE_TOKENIZER_SPLITS", same, of_gguf))
    rows = [{"by": by, "names": same, "lengths": lengths(tokenizer)} for by, same, tokenizer in ways]
    text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    GOLDEN.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    print(f"{GOLDEN.stat().st_size:,} bytes, {[(row['by'], row['names'][0]) for row in rows]}")


if __name__ == "__main__":
    main()
