"""Make `gemma_tokens.json`: texts, and their ids as llama.cpp's server has them for Gemma 3's vocabulary.

    python -m tests.goldens.gemma_tokens

Run from the repository, with the environment of `make bench`, for it needs xllamacpp, which no test does. The texts
are those that llama.cpp tests its tokenizers with, some of what is odd about this vocabulary, and random ones: its
added tokens are runs of spaces, tabs and line breaks, and tags of HTML.
"""

from __future__ import annotations

import json
import random
import urllib.request
from pathlib import Path

import xllamacpp

from ..real_models import GEMMA_3_270M, real_model

HERE = Path(__file__).resolve().parent
LLAMA_CPP_TEXTS = HERE.parent / "data" / "vectors" / "llama.cpp" / "ggml-vocab-qwen2.gguf.inp"
ODD_TEXTS = (
    *("Hello", " Hello", "Hello ", "Hello  ", "  Hello", "a  b   c", " ", "  ", " " * 31, " " * 32, " " * 70),
    *("\n", "\n\n", "a\nb", "a\n\n\nb\n", "\n" * 31, "\n" * 32, "\n" * 70, "\t", "\t\tx", "\t" * 40, "\r\n", "\n \n"),
    "def f(x):\n    if x:\n        return [1, 2.5]\n\treturn {}\n",
    *("<table><tr><td>1</td></tr></table>", "<b>bold</b> <h1>", "<h7>", "</s>", "[multimodal]", "<start_of_image>"),
    *(
        "<bos>a<eos>",
        "<unused3>",
        "<start_of_turn>user\nHi<end_of_turn>\n",
        "<unk>",
        "<mask> <pad>",
        "<0x41>",
        "<0xFF>",
    ),
    *("▁", "a▁b", "▁▁ ▁", " ▁ ", "\u00a0", "\u200d", "e\u0301", "é", "ﬁ", "\x00", "\x7f", "\ufffd", "\U000e0041"),
    *(
        "12345 6.789e-10",
        "٣٤٥",
        "你好 世界",
        "こんにちは",
        "안녕하세요",
        "Здравствуйте",
        "नमस्ते",
        "שלום",
        "🎉👩‍👩‍👧🇺🇳",
        "ꙮ𒀀𓂀",
    ),
    *("supercalifragilisticexpialidocious", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "=" * 100, "don't can't I'll"),
)
RANDOM_PIECES = (
    *("Hello", "world", " the", " a", "ing", "12", "é", "世", "🎉", "▁", "<", ">", "/", "b", "td", "h1", "table", "s"),
    *(" ", "  ", "     ", "\n", "\n\n", "\t", "<b>", "</s>", "<eos>", "<unused", "7>", "[multi", "modal]"),
)
NUM_RANDOM = 200


def main() -> None:
    texts = [*LLAMA_CPP_TEXTS.read_text("utf-8").split("\n__ggml_vocab_test__\n"), *ODD_TEXTS, *random_texts()]
    params = xllamacpp.CommonParams()
    params.model.path = str(real_model(GEMMA_3_270M))
    params.n_ctx, params.n_gpu_layers, params.verbosity = 64, 0, -1
    server = xllamacpp.Server(params)
    rows = [[text, ids(server.listening_address, text)] for text in dict.fromkeys(texts)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    (HERE / "gemma_tokens.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(rows)} texts")


def random_texts() -> list[str]:
    chance = random.Random(23)
    return ["".join(chance.choices(RANDOM_PIECES, k=chance.randrange(1, 20))) for _ in range(NUM_RANDOM)]


def ids(address: str, text: str) -> list[int]:
    """What `/tokenize` makes of a text; control tokens are parsed, no bos is added."""
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(f"{address}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        found: list[int] = json.load(response)["tokens"]
    return found


if __name__ == "__main__":
    main()
