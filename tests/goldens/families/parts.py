"""The tensors that most decoders share: names, shapes, and numbers that let each feature show.

A gain is around its neutral value with a standard deviation of 0.3, so that a gain that is forgotten or shared shows.
Queries and keys are sized for attention scores with a standard deviation of two to three: attention that is nearly
uniform would hide norms of queries and keys, sinks and soft-caps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..tiny_models import Part
from .family import Config, Off

PRE = ("input_layernorm", "post_attention_layernorm")
POST = ("post_attention_layernorm", "post_feedforward_layernorm")
SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
VOCAB_SIZE = 320
SCORE = 1.35  # of a query's and of a key's standard deviation, where no norm follows


LLLG = ["sliding_attention"] * 3 + ["full_attention"]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
BETAS = {"beta_fast": 3.0, "beta_slow": 0.25}  # of so few pairs, none turns as fast as the usual ones, 32 and 1, say
QKV = ("q_proj", "k_proj", "v_proj")
NO_WINDOW = Off("window", config={"sliding_window": 4096})
QK_NORM = Off("qk_norm", modules=r"self_attn\.[qk]_norm$")
QK_GAIN = Off("qk_gain", tensors={r"\.[qk]_norm": 1.5})
QKV_BIAS = Off("qkv_bias", tensors={r"self_attn\..*bias": 0.0})


def config(architecture: str, model_type: str, dimensions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What config.json says, with what most families say first."""
    base = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    if "rope_parameters" not in changes:
        base["rope_theta"] = 10000.0
    return {"architectures": [architecture], "model_type": model_type, **base, **dimensions, **changes}


def whole(dimensions: dict[str, Any]) -> dict[str, Any]:
    """Dimensions of a family whose heads share out the hidden size, and whose config.json has no head_dim."""
    return {key: value for key, value in dimensions.items() if key != "head_dim"}


def sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }


def gain(name: str, size: int, neutral: float = 1.0, std: float = 0.3) -> Part:
    return f"{name}.weight", (size,), neutral, std


def bias(name: str, size: int, std: float = 0.5) -> Part:
    return f"{name}.bias", (size,), 0.0, std


def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> Part:
    """A matrix that keeps the standard deviation of its input, times `scale`."""
    return f"{name}.weight", (rows, columns), 0.0, scale * columns**-0.5


def head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def attention(
    *,
    qk_norm: tuple[str, str] | None = None,
    whole_width: bool = False,
    biases: Sequence[str] = (),
    neutral: float = 1.0,
    out: float = 0.5,
    score: float = SCORE,
) -> Callable[[Config, int, str], Iterator[Part]]:
    """Four projections under a layer's `self_attn.`; `qk_norm` names the norms of queries and keys.

    A gain of theirs is sqrt(`score` squared), so that scores are as wide as without.
    """

    def parts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
        hidden, size = c["hidden_size"], head_dim(c)
        query, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
        scale = 1.0 if qk_norm else score
        for name, rows, columns, wide in (
            ("q_proj", query, hidden, scale),
            ("k_proj", kv, hidden, scale),
            ("v_proj", kv, hidden, 1.0),
            ("o_proj", hidden, query, out),
        ):
            yield matrix(f"{prefix}self_attn.{name}", rows, columns, wide)
            if name in biases:
                yield bias(f"{prefix}self_attn.{name}", rows)
        for name, width in zip(qk_norm or (), (query, kv), strict=False):
            yield gain(f"{prefix}self_attn.{name}", width if whole_width else size, neutral + score - 1)

    return parts


def gated_mlp(
    c: Config, layer: int, prefix: str, *, name: str = "mlp", inner: int | None = None, biases: Sequence[str] = ()
) -> Iterator[Part]:
    """Gate, up and down projections under a layer's `mlp.`."""
    hidden, inner = c["hidden_size"], inner or c["intermediate_size"]
    for part, rows, columns in (("gate_proj", inner, hidden), ("up_proj", inner, hidden), ("down_proj", hidden, inner)):
        yield matrix(f"{prefix}{name}.{part}", rows, columns)
        if part in biases:
            yield bias(f"{prefix}{name}.{part}", rows)


def decoder(
    mix: Callable[[Config, int, str], Iterator[Part]],
    feed: Callable[[Config, int, str], Iterator[Part]] = gated_mlp,
    *,
    norms: Sequence[str] = PRE,
    neutral: float = 1.0,
    norm_bias: bool = False,
    prefix: str = "model.",
    embedding: float = 1.5,
    last_norm: str = "norm",
) -> Callable[[Config], Iterator[Part]]:
    """A whole decoder: embedding, layers of norms, `mix` and `feed`, the last norm, and the head if it is untied.

    The larger the embedding, the less does rounding in attention move logits.
    """

    def parts(c: Config) -> Iterator[Part]:
        hidden, tied = c["hidden_size"], c["tie_word_embeddings"]
        yield f"{prefix}embed_tokens.weight", (c["vocab_size"], hidden), 0.0, embedding
        for layer in range(c["num_hidden_layers"]):
            at = f"{prefix}layers.{layer}."
            for name in norms:
                yield gain(at + name, hidden, neutral)
                if norm_bias:
                    yield bias(at + name, hidden, 0.2)
            yield from mix(c, layer, at)
            yield from feed(c, layer, at)
        # a tied head would give a token's own logit 100 and more: a probability that float32 cannot tell from 1
        last = 0.3 / embedding if tied else 1.0
        yield gain(f"{prefix}{last_norm}", hidden, neutral - 1 + last, 0.3 * last)
        if norm_bias:
            yield bias(f"{prefix}{last_norm}", hidden, 0.2)
        if not tied:
            yield matrix("lm_head", c["vocab_size"], hidden, 2.0)

    return parts


def fused_mlp(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield matrix(f"{prefix}mlp.gate_up_proj", 2 * c["intermediate_size"], c["hidden_size"])
    yield matrix(f"{prefix}mlp.down_proj", c["hidden_size"], c["intermediate_size"])
