"""Measure speculation: tokens per second of the same replies with and without drafts, in turns; compare all bytes.

    python -m bench.speculation QWEN_ARTIFACT [--rounds 2] [--pairs 10] [--parts tasks open streams draft mtp llama.cpp]
        [--target SMOLLM2_F32_ARTIFACT --draft SMOLLM2_ARTIFACT] [--llama-cpp DIRECTORY] [--right 0.8]

tasks: one request at a time, of which some are edits, JSON and quotes; open: pairs of open text; streams: eight files
at once; draft: open text of the target with a draft model; mtp: random models with an MTP head that is right with the
given probability, kept in .cache/mtp; llama.cpp: its n-gram kinds on the same model and prompts.

Each part is a separate run in the results, which a run of another does not change. If something that a part needs is
missing, that is printed, and the part is skipped.
"""

from __future__ import annotations

from pathlib import Path

from radixlm.runtime.artifact import read_manifest

from ..options import read_options
from ..peers.models import qwen_coder
from ..report.page import publish
from . import llama_cpp, mtp, ours
from .tasks import OPEN, TASKS


def main() -> None:
    """Measure the same replies with and without drafts; print, and write `results/speculation.json`."""
    parts = ("tasks", "open", "streams", "draft", "mtp", "llama.cpp")
    options = read_options(
        __doc__,
        "artifact",
        rounds=2,
        pairs=10,
        parts=parts,
        target=Path,
        draft=Path,
        right=0.8,
        llama_cpp=Path(".cache/llama.cpp"),
    )
    name = read_manifest(options.artifact).name
    asked = set(options.parts)
    if asked & {"tasks", "open", "streams"}:
        with ours.pair(options.artifact) as engines:
            if "tasks" in asked:
                _publish(name, "one request at a time", ours.by_task(engines, TASKS, options.rounds))
            if "open" in asked:
                _publish(name, "pairs of open text", ours.open_text(engines, options.pairs))
            if "streams" in asked:
                _publish(name, "eight streams", ours.streams(engines, options.rounds))
    if "draft" in asked and (options.target is None or options.draft is None):
        print("draft is left out: it needs --target and --draft")
    elif "draft" in asked:
        with ours.pair(options.target, options.draft) as engines:
            title = f"drafts of {read_manifest(options.draft).name}"
            _publish(read_manifest(options.target).name, title, ours.by_task(engines, OPEN, options.rounds))
    if "mtp" in asked:
        for shape, figures in mtp.measure_shapes(options.artifact, options.right, options.rounds, Path(".cache/mtp")):
            _publish(shape, "MTP head, simulated", figures)
    program = options.llama_cpp.resolve() / "llama-server"
    if "llama.cpp" in asked and not program.exists():
        print(f"llama.cpp is left out: there is no {program}")
    elif "llama.cpp" in asked:
        _publish(name, "llama.cpp's n-grams", llama_cpp.measure(program, qwen_coder()))


def _publish(model: str, title: str, figures: ours.Figures) -> None:
    publish("speculation", {"model": f"{model}: {title}", "tasks": figures}, f"{model}: {title}")


if __name__ == "__main__":
    main()
