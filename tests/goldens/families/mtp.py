"""Families with a multi-token prediction head, which transformers leaves out: `make_mtp.py` builds it of its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from ..tiny_models import Part
from .family import Config, TinyFamily
from .hybrid import HYBRID, gated_heads, stacked_experts
from .latent import LATENT, V3_EXPERTS
from .latent import _attention as latent_attention
from .moe import MOE, NORMS, experts
from .parts import PRE, QKV, attention, gain, gated_mlp, matrix

Layer = Callable[[Config, int, str], Iterator[Part]]

# What checkpoints call the parts of a head: around its layer, and before the layer's own.
LIKE_DEEPSEEK = {
    "embedding_norm": "model.layers.{}.enorm",
    "hidden_norm": "model.layers.{}.hnorm",
    "projection": "model.layers.{}.eh_proj",
    "norm": "model.layers.{}.shared_head.norm",
    "layer": "model.layers.{}.",
}
LIKE_QWEN = {
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "projection": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0.",
}
NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen3_5-mtp": LIKE_QWEN,
    "qwen3_5_moe-mtp": LIKE_QWEN,
    "glm4_moe-mtp": LIKE_DEEPSEEK,
    "deepseek_v3-mtp": LIKE_DEEPSEEK,
}


def with_head(tiny: TinyFamily, mix: Layer, feed: Layer, *, key: str, neutral: float = 1.0) -> TinyFamily:
    """`tiny` with a head, which config.json counts under `key`."""
    name, before = f"{tiny.name}-mtp", tiny.parts

    def parts(c: Config) -> Iterator[Part]:
        yield from before(c)
        index, hidden = c["num_hidden_layers"], c["hidden_size"]
        names = {role: part.format(index) for role, part in NAMES[name].items()}
        for role in ("embedding_norm", "hidden_norm", "norm"):
            yield gain(names[role], hidden, neutral)
        yield matrix(names["projection"], hidden, 2 * hidden)
        for norm in PRE:
            yield gain(names["layer"] + norm, hidden, neutral)
        yield from mix(c, index, names["layer"])
        yield from feed(c, index, names["layer"])

    return replace(tiny, name=name, config={**tiny.config, key: 1}, parts=parts, prompt_lengths=(7, 33, 70))


def _named(name: str) -> TinyFamily:
    return next(tiny for tiny in (*HYBRID, *MOE, *LATENT) if tiny.name == name)


_GLM_EXPERTS = experts(shared="shared_experts", selection_bias="gate.e_score_correction_bias", first_dense=1)
_OF_QWEN, _OF_DEEPSEEK = "mtp_num_hidden_layers", "num_nextn_predict_layers"
MTP = (
    with_head(_named("qwen3_5"), gated_heads, gated_mlp, key=_OF_QWEN, neutral=0.0),
    with_head(_named("qwen3_5_moe"), gated_heads, stacked_experts, key=_OF_QWEN, neutral=0.0),
    with_head(_named("glm4_moe"), attention(qk_norm=NORMS, biases=QKV), _GLM_EXPERTS, key=_OF_DEEPSEEK),
    with_head(_named("deepseek_v3"), latent_attention, V3_EXPERTS, key=_OF_DEEPSEEK),
)
