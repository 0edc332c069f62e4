"""Compute digests of the logits of real models and of tiny ones, on every target of the class `fma`.

    python -m bench.digests [--models NAME ...] [--targets NAME ...] [--tokens 512]

Each model is compiled for each target, and `radixlm verify-bits` prints the digest: targets of x86-64 run on this
machine, those of Arm in the emulated Python that `make .venv-arm64/.suite` installs. That takes hours for real models,
so each digest is written as soon as it is known, together with those of earlier runs. The exit code is 1 if digests
differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import TARGETS, Target
from radixlm.compile.sources import default_model
from radixlm.runtime.artifact.cpu import is_of_this_machine

from tests.goldens.families import FAMILIES
from tests.real_models import GEMMA_3_270M, QWEN_2_5_CODER, real_model

from ..machine import ROOT
from ..options import read_options
from ..report.page import publish
from ..report.targets import by_digest
from ..results import read_results

if TYPE_CHECKING:
    from radixlm.compile.kv_layout import KVChoice
    from radixlm.compile.stored_weights import Quantize

EMULATED_PYTHON = ROOT / ".venv-arm64" / "bin" / "python"
_VERIFY_BITS = ("-c", "from radixlm.cli.main import main; main()", "verify-bits")


@dataclass(frozen=True)
class Model:
    """A model to compile: `source` returns its file, or writes its directory into the given folder."""

    source: Callable[[Path], Path]
    kv_dtype: KVChoice = "k12v8"
    quantize: Quantize = "keep"


def _tiny(name: str, kv_dtype: KVChoice, quantize: Quantize) -> Model:
    return Model(FAMILIES[name].write, kv_dtype, quantize)


MODELS: Mapping[str, Model] = {
    "SmolLM2-135M-Instruct Q4_1": Model(lambda _: default_model.download()),
    "Gemma 3 270M Q4_K_M": Model(lambda _: real_model(GEMMA_3_270M)),
    "Qwen2.5-Coder-0.5B-Instruct Q4_K_M": Model(lambda _: real_model(QWEN_2_5_CODER)),
    "tiny gpt-oss: experts, sinks": _tiny("gpt_oss", "k12v8", "q8"),
    "tiny Qwen3.5: states and attention": _tiny("qwen3_5", "k12v8", "q4"),
    "tiny DeepSeek-V2: latent attention, experts": _tiny("deepseek_v2", "f16", "q8"),
    "tiny Llama 4: experts, temperatures": _tiny("llama4", "f32", "q4"),
}
# Apple's systems are not emulated.
FUSED = tuple(name for name, target in TARGETS.items() if target.has_fma and not target.is_for_macos)


def main() -> None:
    """Compute each digest, write it into `results/digests.json`, and print the table."""
    options = read_options(__doc__, models=tuple(MODELS), targets=FUSED, tokens=512)
    for name in options.models:
        for target in map(TARGETS.__getitem__, options.targets):
            if is_of_this_machine(target.triple) and not target.runs_here:
                print(f"{target.name} is left out: this CPU lacks some of {', '.join(target.features)}", flush=True)
                continue
            figures = digest(MODELS[name], target, options.tokens)
            run = f"{name}, {figures['num_tokens']} tokens, {target.name}"
            publish("digests", {"model": name, **figures}, run=run)
    runs = (read_results("digests") or {"runs": {}})["runs"]
    sys.exit(any(len(found) > 1 for found in by_digest(runs.values()).values()))


def digest(model: Model, target: Target, num_tokens: int) -> dict[str, Any]:
    """Compile a model and return the output of `verify-bits`, with the seconds that this took."""
    with tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="digest-") as scratch:
        folder = Path(scratch)
        artifact = folder / "model.radixlm"
        source = model.source(folder / "source")
        compile_model(source, artifact, quantize=model.quantize, kv_dtype=model.kv_dtype, target=target.name)
        python = sys.executable if is_of_this_machine(target.triple) else str(EMULATED_PYTHON)
        command = [python, *_VERIFY_BITS, str(artifact), "--tokens", str(num_tokens), "--json"]
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
        if done.returncode:
            raise RuntimeError(f"verify-bits for {target.name} failed: {done.stderr[-500:]}")
        found: dict[str, Any] = json.loads(done.stdout)
        return {**found, "seconds": time.monotonic() - start}


if __name__ == "__main__":
    main()
