"""Weights stream through a compile: memory of its own grows with the largest tensor, not with the model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ..goldens.tiny_models import TINY_MODELS

HIDDEN, INNER, VOCAB = 1024, 3072, 320
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
LAYER_BYTES = 4 * sum(rows * columns for rows, columns in MATRICES.values())  # in float32

# Compiles, and prints the most anonymous memory that it held (RssAnon, in bytes), sampled every 2 ms.
COMPILE = """
import sys, threading, time
from radixlm.compile import compile_model

peak, done = 0, threading.Event()

def sample():
    global peak
    while not done.wait(0.002):
        with open("/proc/self/status") as status:
            lines = dict(line.split(":", 1) for line in status)
        peak = max(peak, int(lines["RssAnon"].split()[0]) * 1024)

thread = threading.Thread(target=sample)
thread.start()
try:
    compile_model(sys.argv[1], sys.argv[2], quantize=sys.argv[3])
finally:
    done.set()
    thread.join()
print(peak)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("quantize", ["keep", "q8"])
def test_four_times_the_weights_take_little_more_memory(tmp_path: Path, quantize: str) -> None:
    few, many = 2, 8
    grown = _peak_bytes(tmp_path, many, quantize) - _peak_bytes(tmp_path, few, quantize)
    # LLVM takes 2.5 MB for a layer's calls; holding the weights would be a quarter of this in 8 bits, half in 16
    assert grown < (many - few) * LAYER_BYTES / 8


def _peak_bytes(directory: Path, num_layers: int, quantize: str) -> int:
    source = _write(directory / f"model-{num_layers}", num_layers)
    artifact = directory / f"{num_layers}.radixlm"
    command = [sys.executable, "-c", COMPILE, str(source), str(artifact), quantize]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    for path in (source, artifact):
        shutil.rmtree(path, ignore_errors=True)  # pytest would keep hundreds of megabytes
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def _write(directory: Path, num_layers: int) -> Path:
    """A Llama in float16 whose matrices are cut from one block of random numbers."""
    TINY_MODELS["llama3"].write(directory)
    config = json.loads((directory / "config.json").read_text())
    changes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    (directory / "config.json").write_text(json.dumps(config | changes | heads | {"rope_scaling": None}))
    numbers = (np.random.default_rng(0).standard_normal(INNER * HIDDEN) * HIDDEN**-0.5).astype(np.float16)
    ones = np.ones(HIDDEN, np.float16)
    tensors = {
        "model.embed_tokens.weight": numbers[: VOCAB * HIDDEN].reshape(VOCAB, HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = ones
        tensors[prefix + "post_attention_layernorm.weight"] = ones
        for name, (rows, columns) in MATRICES.items():
            tensors[f"{prefix}{name}.weight"] = numbers[: rows * columns].reshape(rows, columns)
    save_file(tensors, directory / "model.safetensors")
    return directory
