"""Measure the cost of Llama-2's appended token, time and memory: one conversation over completions, in three ways.

    python -m bench.replay.suffix ARTIFACT [--turns 8] [--rounds 3]

The conversation joins questions and replies of OASST, with the real tokenizer (`RADIXLM_DATA`) and prompts that end in
`[/INST] `, as MLC-LLM writes them. The model has two of Llama-2-7B's 32 layers and random weights, and is made first if
ARTIFACT is missing. It computes all prompts and replies as given; the client trims the white space around a reply, as
MLC's does. Each round runs all ways, each in a separate engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from radixlm.compile import compile_model
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.cache.why_not_more import MatchPolicy
from radixlm.runtime.chat.reply_start import given_reply
from radixlm.runtime.model.batch import Runner
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.runtime.model.scripted_runner import ScriptedRunner

from ..data import data_dir, oasst
from ..options import read_options
from ..random_models import Shape, write_random_model
from ..report.page import publish
from ..worker import Closable
from .models import MODELS, read_tokenizer

SHAPE = Shape("llama2", 4096, 11008, 2, 32, 32, False, vocab_size=32_000)
NUM_LAYERS = 32  # of Llama-2-7B
KV_BYTES = 1 << 30


@dataclass(frozen=True)
class Way:
    """A policy of matching a prompt, and whether the engine computes the token of its last space."""

    match: MatchPolicy
    strips: bool


WAYS: Mapping[str, Way] = {
    "exact, 29871 fed": Way("exact", strips=False),
    "exact": Way("exact", strips=True),
    "text": Way("text", strips=True),
}
BEGINNINGS: Mapping[str, str] = {"▁The": " ", "The": ""}
"""How replies begin, and the text that precedes them for that."""


@dataclass(frozen=True)
class Turn:
    """The measurements of one prompt, and the number of pages in the cache after its reply."""

    num_prompt_tokens: int
    num_cached_tokens: int
    to_first_token_s: float
    num_pages: int


class ScriptedChat(Closable):
    """An engine whose model's replies are given; a context manager."""

    def __init__(self, artifact: Path, way: Way) -> None:
        self._way = way
        self._engine = Engine(
            artifact,
            kv_cache_bytes=KV_BYTES,
            max_num_seqs=1,
            match=way.match,
            idle_work=False,
            speculate="off",
            open_runner=self._open_runner,
        )
        self._end_id = self._engine.manifest.tokenizer.eos_token_ids[0]

    def run(self, exchanges: Iterable[tuple[str, str]], before_reply: str) -> Iterator[Turn]:
        """Yield the turns of questions and their replies, with a warm model."""
        self._engine.generate([*range(1000, 1064)], SamplingParams(max_tokens=1), namespace=b"warm-up")
        self._engine.clear_cache(b"warm-up")
        prompt = "<s>"
        for question, reply in exchanges:
            prompt += f"[INST] {question.strip()} [/INST] "
            yield self._ask(prompt, before_reply + reply.strip())
            prompt += f"{reply.strip()} </s><s>"

    def _ask(self, prompt: str, reply: str) -> Turn:
        tokenizer, strips = self._engine.tokenizer, self._way.strips
        prepared = self._engine.prompts.completion(prompt, strip_suffix=strips)
        ids = given_reply(prepared, [*tokenizer.encode_inside(reply), self._end_id], tokenizer, (self._end_id,))
        self._script.script.extend(ids)
        params = SamplingParams(temperature=0.0, max_tokens=len(ids))
        completion = self._engine.generate(prompt, params, strip_suffix=strips)
        assert completion.token_ids == ids and completion.text.strip() == reply.strip(), "it says something else"
        first_s = completion.timings.time_to_first_token_s
        assert first_s is not None
        usage, stats = completion.usage, self._engine.stats()
        return Turn(usage.prompt_tokens, usage.cached_tokens, first_s, stats.num_cached_pages)

    def _open_runner(self, artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
        model = ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads)
        self._script = ScriptedRunner(artifact.manifest.model.vocab_size, model)
        return self._script

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def make_artifact(path: Path) -> None:
    """Write and compile the model."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / SHAPE.name
        write_random_model(SHAPE, source, read_tokenizer(MODELS["llama2"], data_dir()))
        compile_model(source, path, quantize="q4")


def _exchanges(num_turns: int) -> list[tuple[str, str]]:
    """Return the first question of each of the first conversations, and the reply to it."""
    talks = oasst(data_dir())
    replies = {chat.texts[0]: chat.texts[1] for chat in talks}
    return list(replies.items())[:num_turns]


def main() -> None:
    """Measure the cost of Llama-2's appended token; print, and write `results/suffix.json`."""
    options = read_options(__doc__, "artifact", turns=8, rounds=3)
    if not options.artifact.exists():
        make_artifact(options.artifact)
    exchanges = _exchanges(options.turns)
    rows = []
    for number in range(options.rounds):
        for beginning, before_reply in BEGINNINGS.items():
            for name, way in WAYS.items():
                with ScriptedChat(options.artifact, way) as chat:
                    turns = list(chat.run(exchanges, before_reply))
                rows.append({"round": number, "replies": beginning, "way": name, "turns": list(map(asdict, turns))})
    layout = Artifact.open(options.artifact).manifest.kv
    page_bytes = layout.page_bytes // layout.num_layers * NUM_LAYERS
    publish("suffix", {"page_bytes": page_bytes, "num_layers": layout.num_layers, "rows": rows})


if __name__ == "__main__":
    main()
