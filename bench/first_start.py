"""Measure how long a model file takes to become an artifact, and a new server to give its first answer.

    python -m bench.first_start [MODEL.gguf ...] [--rounds 3] [--folder DIR] [--llama-server FILE | --wheel]

Without a model: SmolLM2-135M in Q4_1. `--folder` holds copies and artifacts: a folder of the disk in question, or of a
tmpfs. Each round begins with the file out of the page cache, if it is on a disk. A cold start has an empty kernel
cache, a warm one has all kernels. `make .cache/llama.cpp/.built` builds llama.cpp's server for this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from radixlm.compile.sources import default_model
from radixlm.runtime.artifact.cpu import default_num_threads

from .processes import RADIXLM, peak_memory_during
from .report.page import publish
from .served import Client, ServedProcess

_STARTS_WITHIN_S = 1800.0
_POLL_S = 0.1
_PROMPT = "The capital of France is"
_BUILD = re.compile(r"build: done in ([0-9.]+) s")
Values = dict[str, list[float]]


def main() -> None:
    """Measure, print, write `results/first_start.json`, which keeps the last run of each model and folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".cache"))
    parser.add_argument("--disk", default="disk", help="what the folder is called in the table")
    parser.add_argument("--llama-server", type=Path, default=Path(".cache/llama.cpp/llama-server"))
    parser.add_argument("--wheel", action="store_true", help="take llama.cpp as the wheel `xllamacpp` has it, for AVX2")
    options = parser.parse_args()
    llama_cpp: Sequence[str] = (str(options.llama_server.resolve()),) if options.llama_server.exists() else ()
    if options.wheel:
        llama_cpp = (sys.executable, "-m", "bench.peers.wheel_server")
    for gguf in [path.resolve() for path in options.models] or [default_model.download()]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            values: Values = defaultdict(list)
            for _ in range(options.rounds):
                measure(gguf, Path(folder), llama_cpp, values)
        figures = {"model": gguf.name, "bytes": gguf.stat().st_size, "disk": options.disk, "values": dict(values)}
        publish("first_start", figures, run=f"{gguf.name}, {options.disk}")


def measure(gguf: Path, folder: Path, llama_cpp: Sequence[str], values: Values) -> None:
    """Add a round to `values`: seconds, except `*_mib`. `llama_cpp` is the command of a server, or empty."""

    def add(**figures: float) -> None:
        for name, figure in figures.items():
            values[name].append(figure)
            print(f"{name} {figure:.1f}", flush=True)

    forget(gguf)
    start = time.perf_counter()
    shutil.copyfile(gguf, folder / "copy")
    subprocess.run(["sync", str(folder / "copy")], check=True)
    add(copy=time.perf_counter() - start)
    (folder / "copy").unlink()

    kernels = folder / "kernels"
    for state in ("cold", "warm"):
        if state == "cold":
            shutil.rmtree(kernels, ignore_errors=True)
        forget(gguf)
        wall, cpu, mib, _ = compiled(gguf, folder, kernels)
        add(**{f"compile_{state}": wall, f"compile_{state}_cpu": cpu, f"compile_{state}_mib": mib})
    compiled(gguf, folder, kernels, "--context-length", "1024")
    for name, change in (("context", ("--context-length", "2048")), ("kv", ("--kv-dtype", "f16"))):
        add(**{f"build_{name}": compiled(gguf, folder, kernels, *change)[3]})

    if llama_cpp:
        forget(gguf)
        settings = ("--ctx-size", "4096", "--parallel", "1", "--flash-attn", "on", "--cache-ram", "0")
        command = (*llama_cpp, "--model", str(gguf), "--threads", str(default_num_threads()), *settings)
        add(llama_cpp=first_token(command, {})[0])
    serve = (RADIXLM, "serve", str(gguf))
    for state in ("cold", "warm", "second"):
        cache, place = folder / "cache", folder / "cache" / "radixlm"
        if state != "second":
            shutil.rmtree(cache, ignore_errors=True)
            place.mkdir(parents=True)
        if state == "warm":
            shutil.copytree(kernels, place / "kernels")
        forget(gguf)
        seconds, server = first_token(serve, {"XDG_CACHE_HOME": str(cache)}, keep=True)
        add(**{f"serve_{state}": seconds})
        assert server is not None
        artifacts = place / "artifacts"
        while any(artifacts.glob("*.lock")):  # the server continues while its artifact is written
            time.sleep(_POLL_S)
        server.close()
    shutil.rmtree(folder / "cache")


def compiled(gguf: Path, folder: Path, kernels: Path, *options: str) -> tuple[float, float, float, float]:
    """Compile in a separate process; return wall seconds, CPU seconds, MiB of private memory, seconds of building."""
    output = folder / "model.radixlm"
    shutil.rmtree(output, ignore_errors=True)
    command = (RADIXLM, "compile", str(gguf), "-o", str(output), *options)
    environ = {**os.environ, "RADIXLM_KERNEL_CACHE": str(kernels)}
    with tempfile.TemporaryFile("w+") as log:
        start, before = time.perf_counter(), os.times()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environ)
        peak = peak_memory_during(process.pid, process.wait)
        wall, after = time.perf_counter() - start, os.times()
        log.seek(0)
        said = log.read()
    build = _BUILD.search(said)
    if process.returncode or build is None:
        raise RuntimeError(f"{' '.join(command)}: {said[-500:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    shutil.rmtree(output)
    return wall, cpu, peak.anonymous / 2**20, float(build[1])


def first_token(
    command: Sequence[str], environment: dict[str, str], *, keep: bool = False
) -> tuple[float, ServedProcess | None]:
    """Return the seconds from the start of a server to a first token; and the server, if it is kept."""
    server = ServedProcess(command, starts_within_s=_STARTS_WITHIN_S, environment=environment)
    body = {"prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
    Client(server.port).json("POST", "/v1/completions", body)
    seconds = time.perf_counter() - server.started_at
    if keep:
        return seconds, server
    server.close()
    return seconds, None


def forget(path: Path) -> None:
    """Drop a file's pages from the page cache; those of a tmpfs stay."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
