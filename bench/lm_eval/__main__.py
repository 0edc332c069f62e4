"""Measure lm-evaluation-harness's scores of a model by how its numbers are stored, and by the share of a prefix that is
read.

    python -m bench.lm_eval [MODEL.gguf ...] [--documents 200] [--instruments .venv-instruments]

Each way is compiled, served, and queried by the harness over HTTP, as docs/serving.md describes: likelihoods of
passages of Shakespeare, boolean expressions of BBH's kind after solved ones, and questions about passages of NQ-open.
Shares of prefixes are read from disk after a restart (`in_parts.py`), by other questions than before it. Rounding
starts from the file's numbers as floats, which `make peers` leaves in .cache/peers. `make test-instruments` makes
the harness's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixlm.compile import compile_model
from radixlm.compile.kv_layout import KVChoice
from radixlm.compile.stored_weights import Quantize

from ..peers.models import default_models
from ..processes import RADIXLM
from ..report.page import publish
from ..served import ServedProcess
from ..worker import ROOT
from .tasks import ASKED, METRICS, TAUGHT, write_tasks

BUDGETS = (1.0, 0.25, 0.5, 0.75)  # the most important first: all of them take hours
_QUIET_S = 15.0  # a store that wrote nothing for so long has finished
Scores = dict[str, float]  # by task and metric, `nq f1`


@dataclass(frozen=True)
class Way:
    """A format of a model's numbers; with `of_floats`, rounded from the file's numbers as floats."""

    title: str
    quantize: Quantize = "keep"
    kv_dtype: KVChoice = "auto"
    of_floats: bool = False


WAYS = (
    Way("as in the file"),
    Way("as in the file, keys and values in f16", kv_dtype="f16"),
    Way("as in the file, keys and values in f32", kv_dtype="f32"),
    Way("widened, --quantize q8", quantize="q8", of_floats=True),
    Way("widened, --quantize q4", quantize="q4", of_floats=True),
)


def main() -> None:
    """Measure each model, print, and write `results/lm_eval.json`, which keeps the last run of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--documents", type=int, default=200, help="of each task at most")
    parser.add_argument("--instruments", type=Path, default=Path(".venv-instruments"))
    options = parser.parse_args()
    harness = options.instruments.resolve() / "bin" / "lm-eval"
    if not harness.exists():
        parser.error(f"there is no {harness}; `make test-instruments` makes it")
    for gguf in [path.resolve() for path in options.models] or default_models():
        with tempfile.TemporaryDirectory() as folder:
            write_tasks(Path(folder), options.documents)
            rows: list[dict[str, Any]] = []
            for row in measure_ways(gguf, Path(folder), harness):
                rows.append(row)  # each is stored at once, because all of them take hours
                publish("lm_eval", {"model": gguf.stem, "documents": options.documents, "rows": rows}, run=gguf.name)


def measure_ways(gguf: Path, folder: Path, harness: Path) -> Iterator[dict[str, Any]]:
    """Compile and serve a model in each of `WAYS`, and yield a row of scores for each.

    For the first way, rows follow for each share of a stored prefix that is read.

    Args:
        folder: has the harness's tasks, and gets the artifact.
        harness: the program `lm-eval`.
    """
    widened = Path(".cache/peers").resolve() / gguf.stem / "hf"
    for way in WAYS:
        if way.of_floats and not widened.exists():
            print(f"{way.title} is not measure_ways: there is no {widened}", file=sys.stderr)
            continue
        artifact = folder / "model.radixlm"
        source = _join_tokenizer(widened, artifact, folder / "floats") if way.of_floats else gguf
        compile_model(source, artifact, quantize=way.quantize, kv_dtype=way.kv_dtype)
        with served(artifact) as server:
            yield {"way": way.title, "scores": scored(server, folder, harness, tuple(METRICS))}
        if way == WAYS[0]:
            yield from _measure_shares(artifact, folder, harness)


def _join_tokenizer(widened: Path, artifact: Path, made: Path) -> Path:
    """Return a checkpoint, made in folder `made`: the files of `widened` with the artifact's tokenizer.

    The tokenizer that transformers wrote has tokens without a row.

    Args:
        widened: the model's numbers as floats, which transformers has written.
    """
    if not made.exists():
        made.mkdir()
        for path in widened.iterdir():
            if not path.name.startswith("tokenizer"):
                (made / path.name).symlink_to(path)
        shutil.copy(artifact / "tokenizer.json", made)
    return made


def _measure_shares(artifact: Path, folder: Path, harness: Path) -> Iterator[dict[str, Any]]:
    """Yield a row of scores for each share of a stored prefix that is read from disk.

    For each, a server first learns from other questions about the same prefixes, and is started again.
    """
    subprocess.run([RADIXLM, "calibrate", str(artifact), "--json"], check=True, stdout=subprocess.DEVNULL)
    in_parts = (sys.executable, "-m", "bench.lm_eval.in_parts")
    for budget in BUDGETS:
        with tempfile.TemporaryDirectory() as store:
            with ServedProcess([*in_parts, str(artifact), store, "--share", "1.0"]) as server:
                run_harness(server, folder, harness, TAUGHT)
                _settle(server)
            with ServedProcess([*in_parts, str(artifact), store, "--share", str(budget)]) as server:
                found = scored(server, folder, harness, ASKED)
                in_part = _read_metric(server, 'parts_total{outcome="pruned"}')
        yield {"way": f"{budget:.0%} of stored prefixes", "scores": found, "in_part": in_part}


def _settle(server: ServedProcess) -> None:
    """Wait until the server has written everything to disk, also prefixes in order of importance."""
    before = None
    while before != (now := [_read_metric(server, name) for name in ("bytes_written_total", "runs_rewritten_total")]):
        before = now
        time.sleep(_QUIET_S)


def _read_metric(server: ServedProcess, name: str) -> int:
    """Return the value of the server's metric `radixlm_store_{name}`; 0 if it has none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        found = re.search(rf"(?m)^radixlm_store_{re.escape(name)} (\S+)", answer.read().decode())
    return int(float(found[1])) if found else 0


def served(artifact: Path) -> ServedProcess:
    """Start a server of the artifact, and wait until it is ready."""
    return ServedProcess([RADIXLM, "serve", str(artifact), "--model-id", "model"])


def scored(server: ServedProcess, folder: Path, harness: Path, tasks: Sequence[str]) -> Scores:
    """Return all metrics of some tasks."""
    found = run_harness(server, folder, harness, tasks)
    return {f"{task} {metric}": float(found[task][f"{metric},none"]) for task in tasks for metric in METRICS[task]}


def run_harness(server: ServedProcess, folder: Path, harness: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Run the harness on some tasks against a server; return its results, by task."""
    with tempfile.TemporaryDirectory() as out:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        told = f"model=model,base_url={url},num_concurrent=4,max_length=4096"
        model = ("--model", "local-completions", "--model_args", told, "--batch_size", "1")
        command = (str(harness), "run", *model, "--tasks", ",".join(tasks), "--include_path", str(folder))
        offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
        environment = os.environ | offline | {"NO_PROXY": "127.0.0.1", "HOME": out, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--output_path", f"{out}/out"], cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"lm-eval failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        [path] = Path(out, "out").rglob("results_*.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


if __name__ == "__main__":
    main()
