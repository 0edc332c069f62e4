"""Make `saved.json`: what `save_pretrained` of transformers writes of the tiny families, but the numbers.

    python -m tests.goldens.make_saved

Run from the repository, in the environment of `requirements.txt`. Each family is loaded and saved by its own class, and
by those of `INSIDE`, which have a vision tower with one tiny layer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from .families import FAMILIES
from .oracle import quiet
from .saved import FILE, renamed, tiny_of
from .tiny_models import TINY_MODELS

_LAYER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SMALL = {"patch_size": 4, "image_size": 16, **_LAYER}
_QWEN = {
    "depth": 1,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_LLAMA4 = {
    **_SMALL,
    "intermediate_size": 128,
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
_AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
_GEMMA4 = {"vision_config": {**_LAYER, "num_key_value_heads": 2, "head_dim": 16}, "audio_config": _AUDIO}
_UNIFIED = {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 16}}

# By family, other classes that hold it, and what config.json says beside the language model.
INSIDE: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "gemma3": {"Gemma3ForConditionalGeneration": {"vision_config": _SMALL, "mm_tokens_per_image": 4}},
    "gemma4": {"Gemma4ForCausalLM": {}, "Gemma4ForConditionalGeneration": _GEMMA4},
    "gemma4-moe": {"Gemma4ForCausalLM": {}, "Gemma4ForConditionalGeneration": _GEMMA4},
    "gemma4-unified": {"Gemma4UnifiedForCausalLM": {}, "Gemma4UnifiedForConditionalGeneration": _UNIFIED},
    "mistral": {"Mistral3ForConditionalGeneration": {"vision_config": _SMALL}},
    "ministral3": {"Mistral3ForConditionalGeneration": {"vision_config": _SMALL}},
    "mistral4": {"Mistral3ForConditionalGeneration": {"vision_config": _SMALL}},
    "llama4": {"Llama4ForConditionalGeneration": {"vision_config": _LLAMA4}},
    "qwen3_5": {"Qwen3_5ForConditionalGeneration": {"vision_config": _QWEN}},
    "qwen3_5_moe": {"Qwen3_5MoeForConditionalGeneration": {"vision_config": _QWEN}},
}
# What names may begin with inside a class, by what they begin with in a family.
_PREFIXES = (
    {},
    {"model.language_model.": "model."},
    {"model.": "model.language_model."},
    {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
)


def main() -> None:
    quiet()
    torch.manual_seed(0)
    made = {}
    for name, tiny in {**TINY_MODELS, **FAMILIES}.items():
        if "quantization_config" in tiny.config:
            continue  # transformers saves it as floats, or in a layout of its own
        made[name] = saved(name, tiny.config)
        for class_name, more in INSIDE.get(name, {}).items():
            made[f"{name}-in-{class_name}"] = saved(name, nested(tiny.text, class_name, more))
    lines = (f"{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}" for name, entry in made.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{len(made)} families, {FILE.stat().st_size:,} bytes")


def nested(text: Mapping[str, Any], class_name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a class that has the language model `text` in it, or is of it alone."""
    model_type = getattr(transformers, class_name).config_class.model_type
    outer = {"text_config": dict(text), **more} if class_name.endswith("Generation") else dict(text)
    return {**outer, "architectures": [class_name], "model_type": model_type}


def saved(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the class that `config` names writes of a tiny family."""
    tiny = tiny_of(name)
    ours = tiny.stored(tiny.tensors)
    family = getattr(transformers, config["architectures"][0])
    for prefixes in _PREFIXES:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            (path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
            arrays = {renamed(key, prefixes): array for key, array in ours.items()}
            save_file(arrays, path / "model.safetensors", metadata={"format": "pt"})
            model, info = family.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
            if info["unexpected_keys"] or any(_is_of_text(key) for key in info["missing_keys"]):
                continue
            model.save_pretrained(path / "out")
            theirs = load_file(path / "out" / "model.safetensors")
            return entry(name, json.loads((path / "out" / "config.json").read_text()), ours, theirs)
    raise SystemExit(f"{name}: {config['architectures'][0]} does not take its names")


def _is_of_text(name: str) -> bool:
    """Whether a tensor is of the language model."""
    return not any(part in name for part in ("vision", "visual", "audio", "projector", "adapter"))


def entry(name: str, config: Any, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Which of their tensors are ours, and the shapes of the others."""
    for prefixes in _PREFIXES:
        names = {renamed(key, prefixes): key for key in ours}
        if names.keys() <= theirs.keys():
            wrong = [key for key in names if not np.array_equal(theirs[key], ours[names[key]])]
            if wrong:
                raise SystemExit(f"{name}: transformers saves other numbers as {wrong[:3]}")
            others = {key: list(array.shape) for key, array in theirs.items() if key not in names}
            config = {key: value for key, value in config.items() if key != "transformers_version"}
            return {"family": name, "config": config, "prefixes": prefixes, "others": others}
    raise SystemExit(f"{name}: transformers saves other names, such as {sorted(theirs.keys() - ours.keys())[:3]}")


if __name__ == "__main__":
    main()
