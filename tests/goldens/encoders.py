"""Tiny encoders as embedding models of the hub have them, and what transformers gives of texts.

`encoders.npz` has pooled hidden states, and what `save_pretrained` writes: configurations and names of tensors. Needs
no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from .families.family import Config, Off, TinyFamily
from .families.parts import SCORE, bias, gain, matrix
from .tiny_models import Part, byte_alphabet

FILE = Path(__file__).resolve().parent / "encoders.npz"
POOLINGS = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
LENGTHS = (1, 7, 70, 300)
VOCAB_SIZE = 320
NUM_SPECIAL = 5  # ids of control tokens, which come first
TEXT = "the tree is not a house, and it rains"
_WORDS = ("the", "tree", "is", "not", "a", "house", "and", "it", "rain")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class TinyEncoder(TinyFamily):
    """One encoder, with the tokenizer that its family has, and how its hidden states are pooled.

    `prefix` begins the names of its tensors in a class that has more than the encoder. `keys` are those of
    transformers, where the hub's class has others.
    """

    tokens: Callable[[], Mapping[str, Any]] = field(kw_only=True)
    prefix: str = field(kw_only=True)
    keys: Mapping[str, str] = field(kw_only=True, default_factory=dict)
    pooling: str = field(kw_only=True, default="mean")
    file: Path = field(kw_only=True, default=FILE)

    def write(self, directory: Path, off: Off | None = None, *, saved: bool = False) -> Path:
        """Write the checkpoint with sentence-transformers' files, as the hub or as `save_pretrained` names tensors."""
        super().write(directory, off)
        for name in ("generation_config.json", "tokenizer_config.json"):
            (directory / name).unlink()
        dump(directory / "tokenizer.json", self.tokens())
        if saved:
            about = about_saved(self.name, self.file)
            arrays = {new: self.tensors[old][slice(*rows)] for new, (old, *rows) in about["names"].items()}
            save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
            dump(directory / "config.json", about["config"])
        steps = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        kinds = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in steps]
        dump(directory / "modules.json", kinds)
        (directory / "1_Pooling").mkdir(exist_ok=True)
        dump(directory / "1_Pooling" / "config.json", {key: name == self.pooling for name, key in POOLINGS.items()})
        return directory

    def texts(self) -> list[list[int]]:
        """Random texts of `LENGTHS`, without control tokens."""
        return [[NUM_SPECIAL + each % (VOCAB_SIZE - NUM_SPECIAL) for each in self._ids(n)] for n in LENGTHS]


def dump(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def encoder_config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 172}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 320}
    return {"architectures": [architecture], "model_type": model_type, **sizes, **layers, **changes}


def _norm(name: str, size: int) -> Iterator[Part]:
    yield gain(name, size)
    yield bias(name, size, 0.2)


def linear(name: str, rows: int, columns: int, scale: float = 1.0) -> Iterator[Part]:
    yield matrix(name, rows, columns, scale)
    yield bias(name, rows, 0.3)


def _learned(c: Config, prefix: str) -> Iterator[Part]:
    """Embeddings of tokens, positions and types, and the norm of their sum."""
    hidden, at = c["hidden_size"], f"{prefix}embeddings."
    yield f"{at}word_embeddings.weight", (c["vocab_size"], hidden), 0.0, 1.0
    yield f"{at}position_embeddings.weight", (c["max_position_embeddings"], hidden), 0.0, 1.0
    yield f"{at}token_type_embeddings.weight", (c["type_vocab_size"], hidden), 0.0, 1.0
    yield from _norm(f"{at}LayerNorm", hidden)


def bert_parts(prefix: str) -> Callable[[Config], Iterator[Part]]:
    def parts(c: Config) -> Iterator[Part]:
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        yield from _learned(c, prefix)
        for layer in range(c["num_hidden_layers"]):
            at = f"{prefix}encoder.layer.{layer}."
            for name, scale in (("query", SCORE), ("key", SCORE), ("value", 1.0)):
                yield from linear(f"{at}attention.self.{name}", hidden, hidden, scale)
            yield from linear(f"{at}attention.output.dense", hidden, hidden)
            yield from _norm(f"{at}attention.output.LayerNorm", hidden)
            yield from linear(f"{at}intermediate.dense", inner, hidden)
            yield from linear(f"{at}output.dense", hidden, inner)
            yield from _norm(f"{at}output.LayerNorm", hidden)
        yield from linear(f"{prefix}pooler.dense", hidden, hidden)  # which embeddings do without

    return parts


def _nomic(c: Config) -> Iterator[Part]:
    """Under the names of Nomic's own class."""
    hidden, inner = c["n_embd"], c["n_inner"]
    yield "embeddings.word_embeddings.weight", (c["vocab_size"], hidden), 0.0, 1.0
    yield "embeddings.token_type_embeddings.weight", (c["type_vocab_size"], hidden), 0.0, 1.0
    yield from _norm("emb_ln", hidden)
    for layer in range(c["n_layer"]):
        at = f"encoder.layers.{layer}."
        yield f"{at}attn.Wqkv.weight", (3 * hidden, hidden), 0.0, SCORE * hidden**-0.5
        yield matrix(f"{at}attn.out_proj", hidden, hidden)
        yield from _norm(f"{at}norm1", hidden)
        for name, rows, columns in (("fc11", inner, hidden), ("fc12", inner, hidden), ("fc2", hidden, inner)):
            yield matrix(f"{at}mlp.{name}", rows, columns)
        yield from _norm(f"{at}norm2", hidden)


def modernbert_parts(c: Config) -> Iterator[Part]:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield "model.embeddings.tok_embeddings.weight", (c["vocab_size"], hidden), 0.0, 1.0
    yield gain("model.embeddings.norm", hidden)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        if layer:
            yield gain(f"{at}attn_norm", hidden)
        yield f"{at}attn.Wqkv.weight", (3 * hidden, hidden), 0.0, SCORE * hidden**-0.5
        yield matrix(f"{at}attn.Wo", hidden, hidden)
        yield gain(f"{at}mlp_norm", hidden)
        yield matrix(f"{at}mlp.Wi", 2 * inner, hidden)
        yield matrix(f"{at}mlp.Wo", hidden, inner)
    yield gain("model.final_norm", hidden)


def _template(first: str, last: str) -> dict[str, Any]:
    """A post-processor with a token before each text, and one after it; `[SEP]` or `</s></s>` is between two."""
    ids = {first: control_ids()[first], last: control_ids()[last]}
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    single.append({"SpecialToken": {"id": last, "type_id": 0}})
    tokens = {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in ids.items()}
    end, second = {"SpecialToken": {"id": last, "type_id": 0}}, int(last == "[SEP]")
    pair = [*single, *([] if second else [end]), {"Sequence": {"id": "B", "type_id": second}}]
    pair.append({"SpecialToken": {"id": last, "type_id": second}})
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def control_ids() -> dict[str, int]:
    """Ids of the control tokens of all tokenizers here."""
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    return {text: index for each in names for index, text in enumerate(each)}


def _document(first: str, last: str, controls: tuple[str, ...], **parts: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": control_ids()[text], "content": text, **flags} for text in controls]
    empty = {"version": "1.0", "truncation": None, "padding": None}
    return {**empty, "added_tokens": added, "post_processor": _template(first, last), **parts}


def wordpiece() -> dict[str, Any]:
    """As BERT's: lower case, words cut at punctuation, and pieces that go on after `##`."""
    controls = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    pieces = [*controls, *_WORDS, *_LETTERS, *(f"##{each}" for each in _LETTERS), ",", "."]
    pieces += [f"[unused{index}]" for index in range(VOCAB_SIZE - len(dict.fromkeys(pieces)))]
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True}
    return _document(
        *("[CLS]", "[SEP]", controls),
        normalizer={**normalizer, "strip_accents": None},
        pre_tokenizer={"type": "BertPreTokenizer"},
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        model={
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
        },
    )


def unigram() -> dict[str, Any]:
    """As XLM-RoBERTa's: SentencePiece's Unigram, with `▁` before each word."""
    controls = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    pieces = [*controls, "▁", *(f"▁{word}" for word in _WORDS), *_LETTERS, ",", "."]
    pieces += [f"<unused{index}>" for index in range(VOCAB_SIZE - len(pieces))]
    marks = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    vocab = [[piece, 0.0 if index < NUM_SPECIAL else -1.0 - index / 64] for index, piece in enumerate(pieces)]
    return _document(
        *("<s>", "</s>", controls),
        normalizer={"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, marks]},
        decoder=marks,
        model={"type": "Unigram", "unk_id": 3, "vocab": vocab, "byte_fallback": False},
    )


def byte_level() -> dict[str, Any]:
    """As ModernBERT's: byte-level BPE between [CLS] and [SEP]."""
    controls = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    pieces = [*controls, *byte_alphabet(), "th", "the", "Ġt", "Ġa"]
    pieces += [f"|unused{index}|" for index in range(VOCAB_SIZE - len(pieces))]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    merges = [["t", "h"], ["th", "e"], ["Ġ", "t"], ["Ġ", "a"]]
    return _document(
        *("[CLS]", "[SEP]", controls),
        normalizer=None,
        pre_tokenizer=level,
        decoder=level,
        model={**model, "vocab": {piece: index for index, piece in enumerate(pieces)}, "merges": merges},
    )


_LEARNED = (
    Off("positions", tensors={"position_embeddings": 0.0}),
    Off("token_type", tensors={"token_type_embeddings": 0.0}),
    Off("embedding_norm", tensors={r"embeddings\.LayerNorm\.bias": 0.0}),
)
_BERT = (
    *_LEARNED,
    Off("function", config={"hidden_act": "silu"}),
    Off("qkv_bias", tensors={r"self\.\w+\.bias": 0.0}),
    Off("output_bias", tensors={r"output\.dense\.bias": 0.0}),
    Off("norm_bias", tensors={r"output\.LayerNorm\.bias": 0.0}),
    Off("eps", config={"layer_norm_eps": 0.1}),
)
_ALL = (
    TinyEncoder(
        "bert",
        301,
        encoder_config("BertModel", "bert", type_vocab_size=2, layer_norm_eps=1e-12, hidden_act="gelu", pad_token_id=0),
        parts=bert_parts(""),
        offs=_BERT,
        tokens=wordpiece,
        prefix="bert.",
        pooling="cls",
    ),
    TinyEncoder(
        "xlm_roberta",
        302,
        encoder_config(
            *("XLMRobertaModel", "xlm-roberta"),
            max_position_embeddings=322,
            type_vocab_size=1,
            layer_norm_eps=1e-5,
            hidden_act="gelu",
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
        ),
        parts=bert_parts("roberta."),
        offs=(*_BERT, Off("first_position", config={"pad_token_id": 0})),
        tokens=unigram,
        prefix="roberta.",
    ),
    TinyEncoder(
        "nomic_bert",
        303,
        {
            "architectures": ["NomicBertModel"],
            "model_type": "nomic_bert",
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_inner": 160,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 320,
            "type_vocab_size": 2,
            "layer_norm_epsilon": 1e-12,
            "activation_function": "swiglu",
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "rotary_emb_interleaved": False,
            "prenorm": False,
            "qkv_proj_bias": False,
        },
        parts=_nomic,
        offs=(
            *_LEARNED[1:2],
            Off("embedding_norm", tensors={r"emb_ln\.bias": 0.0}),
            Off("function", config={"activation_function": "geglu"}),
            Off("theta", config={"rotary_emb_base": 10000}),
            Off("norm_bias", tensors={r"norm[12]\.bias": 0.0}),
            Off("eps", config={"layer_norm_epsilon": 0.1}),
        ),
        tokens=wordpiece,
        prefix="nomic_bert.",
        keys={
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
            "activation_function": "hidden_act",
            "rotary_emb_base": "rope_theta",
        },
    ),
    TinyEncoder(
        "modernbert",
        304,
        encoder_config(
            *("ModernBertModel", "modernbert"),
            num_hidden_layers=4,
            local_attention=32,
            global_attn_every_n_layers=3,
            global_rope_theta=160000.0,
            local_rope_theta=1000.0,
            hidden_activation="gelu",
            norm_eps=1e-5,
            norm_bias=False,
            attention_bias=False,
            mlp_bias=False,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
            cls_token_id=2,
            sep_token_id=3,
        ),
        parts=modernbert_parts,
        offs=(
            Off("window", config={"local_attention": 640}),
            Off("pattern", config={"global_attn_every_n_layers": 2}),
            Off("global_theta", config={"global_rope_theta": 1000.0}),
            Off("local_theta", config={"local_rope_theta": 160000.0}),
            Off("function", config={"hidden_activation": "silu"}),
            Off("last_norm", tensors={r"final_norm": 1.0}),
            Off("eps", config={"norm_eps": 0.1}),
        ),
        tokens=byte_level,
        prefix="model.",
        pooling="cls",
    ),
)
ENCODERS: Mapping[str, TinyEncoder] = {tiny.name: tiny for tiny in _ALL}


@cache
def about_saved(name: str, file: Path = FILE) -> dict[str, Any]:
    """What `save_pretrained` writes of an encoder: `config`, and by each tensor's name the stored one and its rows."""
    with np.load(file) as arrays:
        about: dict[str, Any] = json.loads(str(arrays[name]))
    return about


@cache
def pooled(name: str) -> list[dict[str, np.ndarray]]:
    """What transformers makes of the texts of an encoder, by pooling, float32."""
    with np.load(FILE) as arrays:
        return [dict(zip(POOLINGS, arrays[f"{name}_{length}"], strict=True)) for length in LENGTHS]


def bare(name: str) -> str:
    """A tensor's name in a checkpoint of the class that is only the encoder."""
    return re.sub(r"^(?:roberta|bert|model)\.", "", name)
