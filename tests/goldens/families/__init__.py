"""Tiny checkpoints of the families, by name."""

from __future__ import annotations

from .dense import DENSE
from .falcon_h1 import FALCON_H1
from .family import Off, TinyFamily
from .gemma import GEMMA
from .gemma4 import GEMMA4
from .gpt_oss import GPT_OSS
from .hybrid import HYBRID
from .latent import LATENT
from .layer_norms import LAYER_NORMS
from .meta import META
from .moe import MOE
from .mtp import MTP
from .post_norms import POST_NORMS

__all__ = ["FAMILIES", "MTP_FAMILIES", "Off", "TinyFamily"]

_ALL = (*DENSE, *POST_NORMS, *LAYER_NORMS, *GEMMA, *MOE, *GPT_OSS, *GEMMA4, *LATENT, *META, *HYBRID, *FALCON_H1)
FAMILIES: dict[str, TinyFamily] = {tiny.name: tiny for tiny in _ALL}
MTP_FAMILIES: dict[str, TinyFamily] = {tiny.name: tiny for tiny in MTP}  # goldens are of what their heads draft
