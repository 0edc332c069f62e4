"""Make `tiny/*-mtp.npz`: what the heads of the tiny families of `families/mtp.py` draft.

    python -m tests.goldens.make_mtp [NAME ...]

transformers leaves heads out when it loads a model. So the head's layer is loaded as one more layer of the model, and
what is around it is built of transformers' own norms, by the definition of DeepSeek-V3 (2024, section 2.2) as published
checkpoints have it: `layer(projection [norm of the next token's embedding, norm of the model's last normed row])`, then
a norm of the head's own and the model's output matrix. Files are as those of `make_families.py`; row j has the draft of
the token behind j + 1 tokens, by what the model made of the first j. Row 0 is zeros: nothing is known before it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from .families.family import TinyFamily
from .families.mtp import MTP, NAMES
from .make_families import kept
from .oracle import Logits, quiet
from .tiny_outputs import FOLDER


def main(names: list[str]) -> None:
    quiet()
    for tiny in MTP:
        if tiny.name in (names or NAMES):
            path = FOLDER / f"{tiny.name}.npz"
            np.savez_compressed(path, digest=tiny.digest(), **kept(tiny, drafts(tiny)))
            print(f"{tiny.name}: {path.stat().st_size:,} bytes")


@torch.inference_mode()
def drafts(tiny: TinyFamily) -> Logits:
    """Logits of each prompt's drafts, float32 `[T, vocab]`."""
    index = int(tiny.config["num_hidden_layers"])
    names = {role: part.format(index) for role, part in NAMES[tiny.name].items()}
    with tempfile.TemporaryDirectory() as directory:
        model = _with_one_more_layer(tiny, Path(directory), names)
    inner = model.model
    *layers, head = inner.layers

    def norm(role: str) -> torch.nn.Module:
        found = type(inner.norm)(inner.norm.weight.shape[0], eps=tiny.config["rms_norm_eps"])
        found.load_state_dict({"weight": torch.tensor(tiny.tensors[names[role] + ".weight"])})
        return found

    projection = torch.tensor(tiny.tensors[names["projection"] + ".weight"])
    inner.layers, model.config.num_hidden_layers = torch.nn.ModuleList(layers), index
    prompts = [torch.tensor([ids]) for ids in tiny.prompts()]
    made = [inner(input_ids=ids, use_cache=False).last_hidden_state[:, :-1] for ids in prompts]
    inner.layers, inner.norm = torch.nn.ModuleList([head]), norm("norm")
    model.config.num_hidden_layers, model.config.layer_types = 1, ["full_attention"]
    found = []
    for ids, hidden in zip(prompts, made, strict=True):
        embedded = norm("embedding_norm")(inner.embed_tokens(ids[:, 1:]))
        entering = torch.cat([embedded, norm("hidden_norm")(hidden)], dim=-1) @ projection.T
        logits = model(inputs_embeds=entering, use_cache=False).logits[0].float().numpy()
        found.append(np.concatenate([np.zeros_like(logits[:1]), logits]))
    return found


def _with_one_more_layer(tiny: TinyFamily, directory: Path, names: dict[str, str]) -> torch.nn.Module:
    """The model, behind whose layers is that of the head."""
    tiny.write(directory)
    index = int(tiny.config["num_hidden_layers"])
    around = tuple(name for role, name in names.items() if role != "layer")
    tensors = {
        name.replace(names["layer"], f"model.layers.{index}."): weight
        for name, weight in tiny.tensors.items()
        if not name.startswith(tuple(f"{part}." for part in around))
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text("utf-8")) | {"num_hidden_layers": index + 1}
    if "layer_types" in config:
        config["layer_types"] = [*config["layer_types"], "full_attention"]
    path.write_text(json.dumps(config), encoding="utf-8")
    family = getattr(transformers, config["architectures"][0])
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
    model, info = family.from_pretrained(directory, dtype=torch.float32, **how)
    wrong = {kind: sorted(map(str, found)) for kind, found in info.items() if found}
    if wrong:
        raise SystemExit(f"{tiny.name}: names or shapes do not fit: {wrong}")
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
