"""Measure a decode step through experts of gpt-oss's shapes, compared with the memory that it must read, and the cost
of routing.

    python -m bench.kernels.experts ARTIFACT

The artifact provides its tokenizer. Hidden 2,880; 64 heads of 64, 8 KV heads; 32 experts of 2,880, 4 per token,
in MXFP4 as on the hub; 2 of its 24 layers, SmolLM2's vocabulary and random weights. A token must read its
active experts, all of the rest, and one row of the embedding. The same step is repeated: it reads far more
than any cache holds.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact
from safetensors.numpy import save_file

from ..limits import ReadBandwidth
from ..model_work import decode_bytes_per_token
from ..options import read_options
from ..report.page import publish
from .forward import make_batch, open_runner, profile, profiled_modules

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, ACTIVE, LAYERS = 2880, 64, 8, 64, 32, 4, 2
PAST, STREAMS = 100, (1, 8)
_GROUP = 32  # numbers of MXFP4 that share a scale
_ROUNDS = 5


def main() -> None:
    """Measure decode steps through experts; print, and write `results/experts.json`."""
    source = read_options(__doc__, "artifact").artifact
    with tempfile.TemporaryDirectory() as directory, profiled_modules() as counters:
        model = Path(directory) / "gpt-oss"
        write_model(model, Artifact.open(source))
        artifact = Artifact.open(compile_model(model, Path(directory) / "experts.radixlm").path)
        runner, workspace = open_runner(artifact, max(STREAMS) * (PAST // 16 + 1))
        bandwidth = ReadBandwidth(find_target("native"))
        num_bytes = decode_bytes_per_token(artifact)
        steps = []
        for streams in STREAMS:
            batch = make_batch("decode", streams, PAST, artifact.manifest.model.vocab_size)
            read, best = bandwidth.measure(), float("inf")
            for _ in range(_ROUNDS):
                seconds, shares = profile(runner, batch, counters[0], workspace)
                read = max(read, bandwidth.measure())
                if seconds < best:
                    best, kernels = seconds, shares
            steps.append(
                {
                    "streams": streams,
                    "seconds": best,
                    "read_gb_per_s": read,
                    "share": num_bytes / best / read / 1e9 if streams == 1 else None,
                    "kernels": [asdict(kernel) for kernel in kernels],
                }
            )
        all_bytes = artifact.manifest.module.weights_bytes
        publish("experts", {"active_bytes": num_bytes, "all_bytes": all_bytes, "steps": steps})


def write_model(directory: Path, of: Artifact) -> None:
    """Write a directory like gpt-oss on the hub, with the tokenizer of another artifact."""
    directory.mkdir()
    vocab_size = of.manifest.model.vocab_size
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "num_hidden_layers": LAYERS,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "max_position_embeddings": 4096,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "eos_token_id": of.manifest.tokenizer.eos_token_ids[0],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(of.tokenizer_json, encoding="utf-8")
    rng = np.random.default_rng(0)

    def floats(*shape: int) -> NDArray[Any]:
        return np.asarray(rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1]), ml_dtypes.bfloat16)

    tensors = {"model.embed_tokens.weight": floats(vocab_size, HIDDEN), "lm_head.weight": floats(vocab_size, HIDDEN)}
    tensors["model.norm.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{norm}.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
        heads, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        for name, outputs, inputs in (
            *(("self_attn.q_proj", heads, HIDDEN), ("self_attn.k_proj", keys, HIDDEN)),
            *(("self_attn.v_proj", keys, HIDDEN), ("self_attn.o_proj", HIDDEN, heads)),
            ("mlp.router", EXPERTS, HIDDEN),
        ):
            tensors[f"{stem}{name}.weight"], tensors[f"{stem}{name}.bias"] = floats(outputs, inputs), floats(outputs)
        tensors[f"{stem}self_attn.sinks"] = floats(HEADS)
        for name, outputs in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
            blocks = (EXPERTS, outputs, HIDDEN // _GROUP)
            tensors[f"{stem}mlp.experts.{name}_blocks"] = rng.integers(0, 256, (*blocks, _GROUP // 2), np.uint8)
            tensors[f"{stem}mlp.experts.{name}_scales"] = rng.integers(118, 121, blocks, np.uint8)  # 2**-9 to 2**-7
            tensors[f"{stem}mlp.experts.{name}_bias"] = floats(EXPERTS, outputs)
    save_file(tensors, directory / "model.safetensors")


if __name__ == "__main__":
    main()
