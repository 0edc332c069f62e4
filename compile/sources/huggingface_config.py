"""A Hugging Face `config.json` as the settings of a family.

Knows where a family is named, and where the language model of a larger one is described.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..families.registry import FAMILIES, unsupported
from ..families.settings import Settings

Json = Mapping[str, Any]
TIED = "tie_word_embeddings"

# Where null is as if the key were not there. Of all others it is a value: no soft cap, no window, no head_dim.
_POSITIONS = ("rope_parameters", "rope_scaling")

_CLASSES = {name: key for key, family in FAMILIES.items() for name in family.huggingface}
_NESTED = {type_: key for key, family in FAMILIES.items() for type_ in family.nested}
_CLASS_OF_TYPE = {type_: name for family in FAMILIES.values() for name, type_ in family.huggingface.items()}


def huggingface_settings(label: str, config: Json) -> Settings:
    """Raises UnsupportedArchitecture for a family that is not known."""
    class_name = _class_name(label, config)
    text = config.get("text_config")
    said = [config, text] if isinstance(text, Mapping) else [config]
    given = {key: value for part in said for key, value in part.items() if value is not None or key not in _POSITIONS}
    architecture = _NESTED.get(str(given.get("model_type")), _CLASSES[class_name])
    values = {**FAMILIES[architecture].defaults, **given}
    if any(part.get(TIED) for part in said):  # which of the two counts was not the same in all versions
        values[TIED] = True
    return Settings(label, "huggingface", architecture, class_name, values)


def _class_name(label: str, config: Json) -> str:
    declared = config.get("architectures") or [_CLASS_OF_TYPE.get(str(config.get("model_type")))]
    name = declared[0] if isinstance(declared, list) and declared[0] else config.get("model_type")
    if isinstance(declared, list) and isinstance(name, str) and name in _CLASSES:
        return name
    raise unsupported(label, name)
