"""Tiny families as sources, evaluated in NumPy, and how far from transformers they are.

A family is tested as soon as its class is in the registry and its checkpoint in `tests/goldens/families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np
from radixlm.compile.families import registry
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops.layers import Norm
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources.source import Source

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES, MTP_FAMILIES, Off
from ...goldens.tiny_models import TINY_MODELS, TinyModel
from ...goldens.tiny_outputs import TinyOutputs

_CLASSES = {name for family in registry.FAMILIES.values() for name in family.huggingface}
NAMES = [name for name, tiny in FAMILIES.items() if tiny.config["architectures"][0] in _CLASSES]  # type: ignore[index]
# A file of gpt-oss cannot say whether YaRN's limits are rounded: they are not, whatever llama.cpp does.
CANNOT_SAY = ("gpt_oss-truncated",)
# Whose files are read.
_IN_FILES = {
    name for family in registry.FAMILIES.values() if family.gguf or family.gguf_of_others for name in family.huggingface
}
# llama.cpp computes something else of these files, or nothing.
_WITHOUT_WITNESS = ("gpt_oss", "deepseek_v2-groups", "deepseek_v2-lite", "exaone4", "qwen3_5-wide", "lfm2-bias")
GGUF_NAMES = [
    name
    for name in NAMES
    if FAMILIES[name].config["architectures"][0] in _IN_FILES  # type: ignore[index]
    and tiny_gguf.converter(FAMILIES[name])
    and (not FAMILIES[name].no_witness or name in _WITHOUT_WITNESS)
    and name not in CANNOT_SAY
]
# Llama, Mistral and Qwen2, which have goldens of their own kind.
OLDEST = list(TINY_MODELS)
OFFS = [(name, off.feature) for name in NAMES for off in FAMILIES[name].offs]
TOLERANCE = 1e-4  # of the standard deviation of a prompt's logits, where all is computed in float32
SEEN = 10 * TOLERANCE  # by how much each feature moves logits at least
# All are compiled with keys and values in float16 and in float32; these in codes, too: windows, caps, sinks, and layers
# that share keys and values or are of unequal width. Llama 4 gives two tokens of 300 another expert than in floats.
IN_CODES = ("gemma2", "gemma4", "glm4", "gpt_oss")
# Those that have nothing which none of these have wait for `make test-long`, and so do keys and values in float32.
OFTEN = ("qwen3-yarn", "phi3-short", "gemma2", "gemma3", "gemma4", "gemma4-moe", "olmo2", "glm4", "cohere2")
OFTEN += ("stablelm-parallel", "granite", "ministral3", "muse_glimmer", "gpt_oss", "granitemoe", "glm4_moe")
OFTEN += ("minimax_m2", "deepseek_v2", "deepseek_v3", "mistral4", "llama4", "lfm2", "lfm2_moe", "qwen3_5", "granite4_h")
OFTEN += ("nemotron_h", "nemotron_h-moe", "falcon_h1")
COMPILED = [name for name in NAMES if not name.endswith(("-scale", "-64"))]  # whose numbers others have, too


def tiny_of(name: str) -> TinyModel:
    """A tiny checkpoint, of the families or of the oldest."""
    return FAMILIES.get(name) or MTP_FAMILIES.get(name) or TINY_MODELS[name]


def off_of(name: str, feature: str) -> Off:
    """How to do without a feature."""
    return next(off for off in FAMILIES[name].offs if off.feature == feature)


def distance(source: Source, name: str, *, off: Off | None = None, enough: float = np.inf) -> float:
    """The largest of all prompts; modules that `off` names pass on what they are given.

    Stops at a prompt that is further off than `enough`.
    """
    tiny, largest = tiny_of(name), 0.0
    for prompt in reversed(TinyOutputs.load(name).prompts):
        logits = numpy_logits(source, tiny, prompt.ids, off)
        largest = max(largest, prompt.distance(logits[prompt.rows]))
        if largest > enough:
            break
    return largest


def numpy_logits(source: Source, tiny: TinyModel, ids: list[int], off: Off | None = None) -> np.ndarray:
    """Logits after each token, as the compiled context length has them."""
    config = resolved(source.config, tiny.context_length)
    ops = without(off.modules)(cache(source.read_float32), ids) if off else ReferenceOps(source.read_float32, ids)
    logits: np.ndarray = evaluate(config, ops)
    return logits


def without(modules: str) -> Callable[..., ReferenceOps]:
    """Operations where norms whose names match do nothing; with an empty pattern, all of them work."""

    class Without(ReferenceOps):
        def _norm(self, x: np.ndarray, norm: Norm) -> np.ndarray:
            if modules and re.search(modules, norm.name.removesuffix(".weight")):
                return x
            return super()._norm(x, norm)

    return Without
