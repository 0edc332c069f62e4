"""Make `pre_tokens.json`: where llama.cpp cuts awkward texts, for each name in `tokenizer.ggml.pre`, and for gemma4.

    python -m tests.goldens.pre_tokens

Run from the repository, with the environment of `make bench`, for it needs xllamacpp. The vocabulary is made here:
its merges were learned from the texts without any cuts, so that a cut that is missing, or one too many, shows in the
ids. Texts are composed (NFC), which llama.cpp leaves to its callers and the makers' tokenizers do.
"""

from __future__ import annotations

import json
import tempfile
import unicodedata
from pathlib import Path

import numpy as np
import xllamacpp
from gguf import GGUFWriter
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from .gemma_tokens import LLAMA_CPP_TEXTS, ODD_TEXTS, ids

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "pre_tokens.json"
VOCAB_SIZE = 1400
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
HIDDEN = 32
# One name for each way of cutting; others mean the same.
NAMES = (
    *("default", "gpt-2", "smollm", "starcoder", "llama-bpe", "dbrx", "glm4", "qwen2", "stablelm2", "qwen35"),
    *("tekken", "gpt-4o", "deepseek-v3", "deepseek-llm", "deepseek-coder", "seed-coder", "bailingmoe", "exaone-moe"),
)
TEXTS = (
    "It's WE'LL don'T they'Ve I'm'd 'tis ''s",
    "camelCaseWords HTTPServer aBC ABc ÀÉîô ǅabc Ⅻ ʰa",
    "1 12 123 1234 12345 1234567 1,234.56 3.14e-10 ٣٤٥ ²³ ½",
    "a.b .c (d) [e]\n{f}\r\n\r\n<g/>\n/h//\n\n  i\t\tj \n k  \n\n",
    "x=1;\n\n    if (x>=2) { return x**2; } // note/\n\n\n#!/bin/sh\n",
    "日本語テキスト、漢字とカタカナ。한국어 문장 中文字符12ab",
    "हिन्दी में लिखा नमस्ते ภาษาไทย กำ العربية שָׁלוֹם កាន់",
    "naïve café coöperate e\u0301le\u0300ve A\u030a x\u0331y",
    "🎉👩‍👩‍👧🇺🇳 €100 £5 ©®™ ¬¦ `code` ~tilde~ ^hat^ \\back",
    "!important #tag @user $var %d &amp; *star* +plus -dash _under_ |pipe|",
    "   leading\n   and trailing   \n\n\n\t\t\t end   ",
    "www.example.com/path?q=1&r=2#frag user@host.org C:\\dir\\file.txt",
)


def texts() -> list[str]:
    """Composed texts, none twice, none empty."""
    every = (*TEXTS, *ODD_TEXTS, *LLAMA_CPP_TEXTS.read_text("utf-8").split("\n__ggml_vocab_test__\n"))
    return [text for text in dict.fromkeys(unicodedata.normalize("NFC", text) for text in every) if text.strip("\0")]


def vocabulary(*, bytes_as_letters: bool) -> tuple[list[str], list[str]]:
    """Tokens by id, and merges, best first; without bytes as letters a space is "▁", as Gemma 4 has it."""
    tokenizer = Tokenizer(models.BPE())
    alphabet: list[str] = []
    if bytes_as_letters:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    # A short piece is seen often, so that cuts everywhere in it meet a merge.
    pieces = [text[i : i + n] for text in texts() for n in (2, 3, 4, 6) for i in range(len(text) - n + 1)]
    if not bytes_as_letters:
        pieces = [line.replace(" ", "▁") for piece in pieces for line in piece.split("\n") if piece.isascii()]
    tokenizer.train_from_iterator(pieces, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    return sorted(model["vocab"], key=model["vocab"].__getitem__), merges


def write_gguf(path: Path, model: str, pre: str, tokens: list[str], types: list[int], merges: list[str]) -> None:
    """A llama of one layer of zeros, which the server needs to give out the tokenizer."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_merges(merges)
    if model == "gemma4":
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    square = np.zeros((HIDDEN, HIDDEN), np.float32)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), HIDDEN), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gemma4() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and merges: special tokens first, line breaks alone and in runs, then bytes."""
    learned, merges = vocabulary(bytes_as_letters=False)
    special = {"<bos>": CONTROL, "<eos>": CONTROL, "<unk>": UNKNOWN}
    data = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    types = {**special, **data, **dict.fromkeys(("\n", "\n\n", *learned), NORMAL)}
    return list(types), list(types.values()), ["\n \n", *merges]


def llama_cpp_ids(path: Path) -> list[list[int]]:
    """What llama.cpp's server makes of the texts with this file's tokenizer."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_gpu_layers, params.verbosity, params.warmup = 64, 0, -1, False
    server = xllamacpp.Server(params)
    return [ids(server.listening_address, text) for text in texts()]


def main() -> None:
    tokens, merges = vocabulary(bytes_as_letters=True)
    gemma_tokens, gemma_types, gemma_merges = gemma4()
    found: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "vocabulary.gguf"
        for name in NAMES:
            write_gguf(path, "gpt2", name, tokens, [NORMAL] * len(tokens), merges)
            found[name] = llama_cpp_ids(path)
        write_gguf(path, "gemma4", "default", gemma_tokens, gemma_types, gemma_merges)
        gemma_ids = llama_cpp_ids(path)
    differ = {name: sum(a != b for a, b in zip(rows, found["gpt-2"], strict=True)) for name, rows in found.items()}
    print(f"{len(texts())} texts; unlike gpt-2: {differ}")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in found.items())
    GOLDEN.write_text(
        f'{{"tokens": {json.dumps(tokens)},\n"merges": {json.dumps(merges)},\n'
        f'"texts": {json.dumps(texts())},\n"ids": {{\n{rows}\n}},\n'
        f'"gemma4": {json.dumps({"tokens": gemma_tokens, "types": gemma_types, "merges": gemma_merges})},\n'
        f'"gemma4_ids": {json.dumps(gemma_ids, separators=(",", ":"))}}}\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
