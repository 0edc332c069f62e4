"""What compiling costs, and how fast decode is, against the size of the model: known shapes with random weights.

    python -m bench.engine.model_sizes TOKENIZER.json --shape 135M 7B --scratch DIRECTORY

TOKENIZER.json has 49,152 tokens, such as SmolLM2's. Weights are bfloat16, compiled to q4. The 7B shape needs 18 GB of
disk and takes some minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact

from ..limits import LimitsMeter
from ..model_work import decode_bytes_per_token
from ..options import read_options
from ..processes import RADIXLM, peak_memory_during
from ..prompts import Prompts
from ..random_models import SHAPES, Shape, write_random_model
from ..report.page import publish
from ..results import read_results
from ..worker import Worker

_PROMPT, _TOKENS, _RUNS = 16, 32, 3


@dataclass(frozen=True)
class SizeResult:
    """Of one shape; memory is anonymous, of the compiling and of the serving process."""

    shape: str
    num_parameters: int
    source_bytes: int
    artifact_bytes: int
    compile_s: float
    compile_memory: int
    decode_tokens_per_s: float
    decode_bandwidth_share: float
    serve_memory: int


def main() -> None:
    """Measure, print, write `results/model_sizes.json`; shapes that are not measured now keep their last result."""
    options = read_options(__doc__, "tokenizer", shape=tuple(SHAPES), scratch=Path)
    meter = LimitsMeter(find_target("native"))
    earlier = read_results("model_sizes") or {"shapes": {}}
    results = {name: SizeResult(**result) for name, result in earlier["shapes"].items()}
    for name in options.shape:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            results[name] = measure(SHAPES[name], Path(scratch), options.tokenizer.read_text("utf-8"), meter)
        in_order = {shape: asdict(results[shape]) for shape in SHAPES if shape in results}
        publish("model_sizes", {"shapes": in_order})


def measure(shape: Shape, scratch: Path, tokenizer_json: str, meter: LimitsMeter) -> SizeResult:
    """Write, compile, decode."""
    source, output = scratch / "source", scratch / f"{shape.name}.radixlm"
    source_bytes = write_random_model(shape, source, tokenizer_json)
    start = time.perf_counter()
    command: list[str | Path] = [RADIXLM, "compile", source, "-o", output, "--quantize", "q4"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    compiling = peak_memory_during(process.pid, process.wait)
    compile_s = time.perf_counter() - start
    if process.returncode != 0:
        assert process.stderr is not None
        raise RuntimeError(f"{shape.name} did not compile: {process.stderr.read().decode()[-500:]}")
    shutil.rmtree(source)  # the larger part of the disk
    artifact = Artifact.open(output)
    prompts = Prompts(0, shape.vocab_size)
    speeds: list[float] = []
    shares: list[float] = []

    def decode() -> None:
        for _ in range(_RUNS):
            ids = prompts.ids(_PROMPT)
            speed, limits = meter.around(lambda: worker.call("decode", prompt=ids, num_tokens=_TOKENS))  # noqa: B023
            speeds.append(float(speed))
            shares.append(float(speed) * decode_bytes_per_token(artifact) / 1e9 / limits.read_gb_per_s)

    with Worker("bench.engine.worker", output) as worker:
        serving = peak_memory_during(worker.pid, decode)
    best = speeds.index(max(speeds))
    return SizeResult(
        shape.name,
        shape.num_parameters,
        source_bytes,
        sum(file.stat().st_size for file in output.iterdir()),
        compile_s,
        compiling.anonymous,
        speeds[best],
        shares[best],
        serving.anonymous,
    )


if __name__ == "__main__":
    main()
