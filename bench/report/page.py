"""The section for each file of results, and the page of all sections. Omits what was not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..results import add_run, read_results, write_results
from . import adapters, answers, cache, engine, first_start, partial, peers, serving, session, store, targets
from .tables import Json, origin

_HEAD = """# Results

Made by `python -m bench.report` from the files in `bench/results`; what a command measures, its first lines say.
Experiments, also those that did not help, are in [LOG.md](LOG.md). Some commits were rebased after the measurement, and
the repository does not have them.
"""

SECTIONS: Mapping[str, Callable[[Json], Iterator[str]]] = {
    "sizes": peers.sizes,
    "session": session.session,
    "peers": peers.peers,
    "vectors": peers.vectors,
    "first_start": first_start.first_start,
    "quality": engine.quality,
    "first_reply": serving.first_reply,
    "engine": engine.engine,
    "request_cost": engine.request_cost,
    "adapters": adapters.adapters,
    "speculation": engine.speculation,
    "experts": engine.experts,
    "growth": engine.growth,
    "long_context": engine.long_context,
    "scaling": engine.scaling,
    "match_cost": cache.match_cost,
    "mooncake": cache.mooncake,
    "partial_needle": partial.needle,
    **{f"partial_{workload}": partial.quality for workload in partial.WORKLOADS},
    "lm_eval": answers.lm_eval,
    "partial_answers": answers.answers,
    "partial_baselines": answers.baselines,
    "scored": partial.scored,
    "learned": partial.learned,
    "store_restart": store.restart,
    "store_partial": store.first_token,
    "store_amplification": partial.amplification,
    "chunk_cache": partial.chunk_cache,
    "ladder": serving.ladder,
    "load": serving.load,
    "kernels": engine.kernels,
    "replay": cache.replay,
    "replay_states": cache.replay_states,
    "hybrid": engine.hybrid,
    "agents": cache.agents,
    "questions": serving.questions,
    "long_prompt": serving.long_prompt,
    "replay_live": cache.replay_live,
    "suffix": cache.suffix,
    "digests": targets.digests,
}
"""By the name of a file of results, the paragraphs that it becomes."""


def publish(name: str, figures: Json, run: str | None = None) -> None:
    """Write results, or the results of one run, keeping those of others, and print their section."""
    path = write_results(name, figures) if run is None else add_run(name, run, figures)
    print(*SECTIONS[name](read_results(name) or {}), path, sep="\n\n")


def render(directory: Path) -> str:
    """Return the Markdown page of all results in `directory`."""
    parts = [_HEAD]
    for name, section in SECTIONS.items():
        results = read_results(name, directory)
        if results is not None:
            parts += section(results)
            if "runs" not in results:  # each of which has an origin
                parts.append(origin(results))
    return "\n\n".join(part.strip() for part in parts) + "\n"
