"""Tiny random decoders in Hugging Face's layout, the same numbers wherever and whenever they are written.

Shared by the script that makes the goldens and by the tests that read them; needs NumPy and safetensors only.
Weights come from PCG64's raw stream, which NumPy promises never to change (distributions it may).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BOS, IM_START, IM_END = 0, 1, 2  # the first ids, then 256 bytes, then merges
SPECIAL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>")
MERGES = """
Ġ t|h e|i n|Ġ a|e r|o n|Ġt he|r e|a t|Ġ s|e n|o r|Ġ w|a n|i s|e s|Ġ o|i t|Ġ c|e d|a l|in g|Ġ b|o u|Ġ p|Ġ f
a r|Ġ m|l l|o m|Ġ in|Ġ d|Ġ h|u s|v e|a s|Ġt o|Ġa n|Ġo f|Ġan d|l e|i c|r o|Ġ n|e l|o t|e t|s t|Ġ re|i on|Ġ l
""".strip().replace("\n", "|")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


Part = tuple[str, tuple[int, ...], float, float]  # name, shape, mean, standard deviation


@dataclass(frozen=True)
class TinyModel:
    """One checkpoint: what `config.json` says, and the seed of its weights."""

    name: str
    seed: int
    config: Mapping[str, object]
    context_length: int = 512
    prompt_lengths: tuple[int, ...] = (1, 7, 33, 70, 300)
    no_witness: str = field(kw_only=True, default="")  # why llama.cpp cannot be asked, if it cannot

    def write(self, directory: Path) -> Path:
        """Write config, weights, tokenizer and chat template into `directory`, made if missing; return it."""
        directory.mkdir(parents=True, exist_ok=True)
        save_file(self.stored(self.tensors), directory / "model.safetensors", metadata={"format": "pt"})
        for name, content in (
            ("config.json", {**self.config, "torch_dtype": "float32"}),
            ("tokenizer.json", tokenizer(self.vocab_size)),
            ("tokenizer_config.json", tokenizer_config()),
            ("generation_config.json", {"bos_token_id": BOS, "eos_token_id": IM_END}),
        ):
            (directory / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
        return directory

    @property
    def text(self) -> Mapping[str, Any]:
        """The settings of the language model, which some families nest."""
        return self.config.get("text_config", self.config)  # type: ignore[return-value]

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """All weights by name, float32."""
        draw = Draw(self.seed)
        return {name: draw(shape, mean, std) for name, shape, mean, std in self.layout()}

    def stored(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The arrays that a file holds for `tensors`; a quantized matrix is several."""
        return tensors

    @property
    def vocab_size(self) -> int:
        return int(self.text["vocab_size"])

    def layout(self) -> Iterable[Part]:
        """Each tensor's name, shape, mean and standard deviation, in the order in which they are drawn."""
        return _layout(self.config)

    def digest(self) -> str:
        """sha256 over names and weights: golden files remember it, so that a changed model is noticed."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            digest.update(name.encode() + self.tensors[name].tobytes())
        return digest.hexdigest()

    def prompts(self) -> list[list[int]]:
        """Random prompts of `prompt_lengths`, over the whole vocabulary."""
        return [self._ids(length) for length in self.prompt_lengths]

    def user_turns(self) -> list[list[int]]:
        """What the user adds in each of three turns; a turn's prompt is all before it, replies included."""
        return [self._ids(length) for length in (11, 5, 18)]

    def _ids(self, length: int) -> list[int]:
        return Draw(1000 * self.seed + length).integers(length, below=self.vocab_size)


@dataclass
class Draw:
    """Numbers from PCG64's raw 64-bit stream."""

    seed: int
    stream: np.random.PCG64 = field(init=False)

    def __post_init__(self) -> None:
        self.stream = np.random.PCG64(self.seed)

    def __call__(self, shape: tuple[int, ...], mean: float, std: float) -> np.ndarray:
        """Uniform numbers; 24 bits each, so that float32 holds them exactly before scaling."""
        raw = self.stream.random_raw(int(np.prod(shape))) >> np.uint64(40)
        uniform = (raw.astype(np.float64) + 0.5) / 2**24 - 0.5
        return (mean + std * np.sqrt(12.0) * uniform).astype(np.float32).reshape(shape)

    def integers(self, count: int, below: int) -> list[int]:
        return [int(raw % np.uint64(below)) for raw in np.atleast_1d(self.stream.random_raw(count))]


def _layout(config: Mapping[str, object]) -> list[Part]:
    """The tensors of Llama, Mistral and Qwen2.

    Embeddings and what attention adds are sized so that the next token depends on the whole context, and yet
    rounding KV to float16 moves no logit by 2e-3 of their standard deviation (at first it was 1.3e-2, with q
    and k twice as large). Norms and biases are uneven, so that forgetting one shows.
    """
    get = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, inner, vocab = get["hidden_size"], get["intermediate_size"], get["vocab_size"]
    query, kv = (get[f"num_{kind}_heads"] * get["head_dim"] for kind in ("attention", "key_value"))
    layout: list[Part] = [
        ("model.embed_tokens.weight", (vocab, hidden), 0.0, 0.6),
        # a tied model repeats its last token for ever, unless the last norm has weights of both signs
        ("model.norm.weight", (hidden,), *((0.0, 1.0) if config["tie_word_embeddings"] else (1.0, 0.2))),
    ]
    for layer in range(get["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
        layout += [(prefix + name, (hidden,), 1.0, 0.2) for name in norms]
        for name, rows, columns, gain in (
            ("self_attn.q_proj", query, hidden, 1.0),
            ("self_attn.k_proj", kv, hidden, 1.0),
            ("self_attn.v_proj", kv, hidden, 1.0),
            ("self_attn.o_proj", hidden, query, 0.5),
            ("mlp.gate_proj", inner, hidden, 1.0),
            ("mlp.up_proj", inner, hidden, 1.0),
            ("mlp.down_proj", hidden, inner, 1.0),
        ):
            layout.append((prefix + name + ".weight", (rows, columns), 0.0, gain * columns**-0.5))
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                layout.append((prefix + name + ".bias", (rows,), 0.0, 0.5))
    if not config["tie_word_embeddings"]:
        layout.append(("lm_head.weight", (vocab, hidden), 0.0, 0.2))
    return layout


def _config(model_type: str, **changes: object) -> dict[str, object]:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[model_type] + "ForCausalLM"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": IM_END,
        **changes,
    }


def _dimensions(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, object]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


LLAMA3_SCALING = {  # of 16 frequencies two stay, three are blended, eleven are divided by 8
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in (
        # 331 and 172 are no multiples of 16: a compiler that rounds up must not show it
        TinyModel("llama", 1, _config("llama", **_dimensions(64, 172, 2, 4, 2, 16), vocab_size=331)),
        TinyModel(
            "llama3",
            22,
            _config(
                "llama",
                **_dimensions(128, 256, 3, 4, 1, 32),
                tie_word_embeddings=True,
                rope_scaling=LLAMA3_SCALING,
            ),
        ),
        TinyModel(
            "llama-linear",
            13,
            _config(
                "llama",
                **_dimensions(64, 160, 2, 4, 4, 16),
                rope_scaling={"rope_type": "linear", "factor": 4.0},
            ),
        ),
        # heads * head_dim is twice the hidden size (Nemo does so too); the window holds the whole context
        TinyModel(
            "mistral",
            54,
            _config("mistral", **_dimensions(96, 224, 2, 6, 2, 32), sliding_window=384),
            context_length=384,
            prompt_lengths=(1, 7, 33, 70, 260),
        ),
        TinyModel(
            "qwen2",
            25,
            _config(
                "qwen2",
                **_dimensions(64, 172, 2, 4, 2, 16),
                tie_word_embeddings=True,
                rope_theta=1000000.0,
                rms_norm_eps=1e-6,
                use_sliding_window=False,
            ),
        ),
        TinyModel(
            "qwen2-untied",
            6,
            _config("qwen2", **_dimensions(128, 192, 2, 8, 2, 16), vocab_size=336, use_sliding_window=False),
        ),
    )
}


def byte_alphabet() -> list[str]:
    """The printable character of each byte 0..255, as byte-level BPE writes them (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def tokenizer(vocab_size: int) -> dict[str, object]:
    """A byte-level BPE `tokenizer.json`: 3 special tokens, 256 bytes, a few English merges, unused specials."""
    merges = MERGES.split("|")
    pieces = [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    specials = {piece: i for i, piece in enumerate(SPECIAL_TOKENS)}
    specials |= {f"<|unused_{i}|>": i for i in range(len(pieces), vocab_size)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for token, i in specials.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(pieces)} | specials,
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[IM_END],
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
