"""What is computed from models: work, shares, random checkpoints, profiles; on tiny ones."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from msgspec import structs
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact

from bench.engine import figures
from bench.engine.__main__ import share_of_limit
from bench.kernels.forward import Counters, make_batch, open_runner, profile, profiled_modules
from bench.limits import Limits
from bench.model_work import decode_bytes_per_token, decode_work, prefill_work
from bench.random_models import Shape, write_random_model

ROOT = Path(__file__).resolve().parents[3]
TINY = Shape("tiny", 64, 96, 2, 4, 2, False, vocab_size=320)


@pytest.fixture(scope="module")
def random_source(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "model"
    tokenizer = (tiny_source / "tokenizer.json").read_text("utf-8")
    size = write_random_model(TINY, directory, tokenizer)
    assert size == 2 * TINY.num_parameters
    return directory


@dataclass(frozen=True)
class Profiled:
    """An artifact whose module counts cycles."""

    artifact: Artifact
    counters: Counters


@pytest.fixture(scope="module")
def profiled(random_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    output = tmp_path_factory.mktemp("artifact") / "tiny.radixlm"
    with profiled_modules() as counters:
        path = compile_model(random_source, output, quantize="q4", kv_dtype="f16").path
    return Profiled(Artifact.open(path), counters[0])


@pytest.fixture(scope="module")
def artifact(profiled: Profiled) -> Artifact:
    return profiled.artifact


def test_random_weights_are_neither_equal_nor_large(random_source: Path) -> None:
    with open_source(random_source) as source:
        matrix = source.read("model.layers.1.mlp.down_proj.weight").dequantize()
        norm = source.read("model.norm.weight").dequantize()
    assert matrix.shape == (64, 96)
    assert 0.018 < matrix.std() < 0.022
    assert (norm == 1).all()


def test_a_decoded_token_reads_all_weights_and_a_row_of_the_embedding(artifact: Artifact) -> None:
    embedding = 320 * 64 * (1 + 2 / 32)  # q8, with a scale for 32
    row, frequencies = 64 + 2 * 2, 64  # of the token; of RoPE, padded, which are no weights of the model
    total = artifact.manifest.module.weights_bytes
    assert decode_bytes_per_token(artifact) == total - embedding + row - frequencies


def test_work_is_counted_by_hand(artifact: Artifact) -> None:
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    kv_row = 2 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head_dim, float16
    work = decode_work(artifact, context=10, num_streams=3)
    assert work.num_bytes == decode_bytes_per_token(artifact) + 30 * kv_row
    assert work.integer_operations == 2 * 3 * (2 * layer + 320 * 64)
    assert work.float_operations == 4 * 64 * 30 * 2
    prompt = prefill_work(artifact, num_tokens=7, num_cached=3)
    assert prompt.integer_operations == 2 * (4 * 2 * layer + 320 * 64)
    assert prompt.float_operations == 4 * 64 * (4 + 5 + 6 + 7) * 2


def test_attention_in_integers_is_no_work_of_floats(artifact: Artifact) -> None:
    manifest = artifact.manifest
    codes = replace(artifact, manifest=structs.replace(manifest, kv=structs.replace(manifest.kv, dtype="k12v8")))
    in_floats, in_integers = (decode_work(each, context=10, num_streams=3) for each in (artifact, codes))
    assert in_integers.float_operations == 0
    more = in_integers.integer_operations - in_floats.integer_operations
    assert more == (2 + 1) * 2 * 64 * 30 * 2  # keys of 16 bits count twice
    assert in_integers.num_bytes < in_floats.num_bytes


def test_shares_are_known_for_all_that_has_known_work(artifact: Artifact) -> None:
    limits = Limits(2, 50.0, 40.0, 2000.0, 1000.0, 500.0, 250.0, 1000.0, 500.0)
    with_share = {figure for figure in figures.OF_AN_ENGINE if share_of_limit(figure, 10.0, artifact, limits)}
    assert with_share == set(figures.OF_AN_ENGINE)
    assert share_of_limit(figures.START, 1.0, artifact, limits) is None
    slower, faster = (share_of_limit(figures.DECODE, speed, artifact, limits) for speed in (10.0, 20.0))
    assert slower is not None
    assert faster == pytest.approx(2 * slower)


def test_a_profile_names_every_kernel_of_a_forward(profiled: Profiled) -> None:
    runner, workspace = open_runner(profiled.artifact, num_pages=16)
    for step in (("prefill", 20, 5), ("decode", 3, 30)):
        batch = make_batch(*step, vocab_size=TINY.vocab_size)
        seconds, shares = profile(runner, batch, profiled.counters, workspace)
        assert sum(share.share for share in shares) == pytest.approx(1)
        assert sum(share.seconds for share in shares) == pytest.approx(seconds)
        calls = {share.kernel: share.num_calls for share in shares}
        assert calls["embedding"] == 1
        assert calls["linear q4_g32 192x64"] == TINY.num_hidden_layers  # gate and up
        assert any(kernel.startswith("attention") for kernel in calls)
    runner.close()


def test_a_step_that_is_cut_for_many_threads_computes_the_same(random_source: Path, tmp_path: Path) -> None:
    """In a process of its own: the module is cut from then on."""
    path = compile_model(random_source, tmp_path / "cut.radixlm", quantize="q4").path
    done = subprocess.run(
        [sys.executable, "-c", _CUT, str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_same"]
    whole, cut = found["scalings"]
    assert whole["num_launches"] == cut["num_launches"] > 0
    assert whole["parts_s"] == whole["longest_s"] > 0
    assert 0 < cut["longest_s"] < cut["parts_s"]


_CUT = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from radixlm.runtime.artifact import Artifact
from bench.engine.scaling import SplitRunner
from bench.kernels.forward import make_batch

runner = SplitRunner(Artifact.open(Path(sys.argv[1])), num_pages=16)
batch = make_batch("prefill", 40, 5, 320)
logits, scalings = [], []
for num_threads in (1, 5):
    scalings.append(asdict(runner.measure("prefill:40:5", batch, num_threads, runs=2)))
    logits.append(runner.runner.forward(batch).tobytes())
print(json.dumps({"is_same": logits[0] == logits[1], "scalings": scalings}))
"""
