"""Is a reply in the ids that the model chose as good a prefix as its text encoded anew? What `text` reuse stands on.

    python -m bench.text_quality ARTIFACT [--samples N]

OASST talks of two questions and two replies (`RADIXLM_DATA`), a minute on two cores. `sampled`: the model answers the
first question at temperature 1, and the answers whose ids are not the encoding of their text are kept; the true text
that follows is the second reply, which a person wrote. `split`: the first reply is the person's too, in ids drawn at
random, which no model says; the second reply follows, or the rest of the first behind its half. What the model makes of
each token that follows is compared with what it makes of it behind the usual ids. KV of reused ids is that of computed
ones bit for bit (tests/runtime/engine/test_law_of_the_row.py), so both are simply computed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.chat.chat_template import ChatTemplate
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.tokenizer_fix import Tokenizer, TokenizerProfile

from .replay_conversations import Conversation, oasst
from .replay_replies import Replies
from .results import write_results
from .texts import data_dir
from .windows import Float64

MAX_REPLY, MAX_NEXT = 96, 48  # tokens of a first reply, and of what follows


@dataclass(frozen=True)
class Compared:
    """One text that follows: the reused ids beside the usual ones, over its tokens."""

    talk: str  # its first question
    ids: str  # sampled, split
    follows: str  # next reply, rest
    gain: float  # mean log-likelihood with the reused ids less that with the usual ones, nats a token
    usual: float  # mean log-likelihood with the usual ids, nats a token
    kl: float  # mean KL(usual || reused), nats a token
    agreement: float  # share of tokens with the same most likely one


class TextQuality:
    """A model that is given ids and asked what it makes of the next ones."""

    def __init__(self, artifact: Artifact, seed: int = 0) -> None:
        info = artifact.manifest.tokenizer
        self._tokenizer = Tokenizer(artifact.tokenizer_json, TokenizerProfile.from_dict(info.profile))
        assert artifact.chat_template is not None, "a chat model is needed"
        self._template = ChatTemplate(artifact.chat_template)
        self._limits = artifact.manifest.module
        self._runner = ModelRunner(artifact, num_pages=artifact.manifest.context_length // PAGE_SIZE)
        self._replies = Replies(self._tokenizer, seed)

    def compare_sampled(self, talk: Conversation, reply_ids: Sequence[int]) -> Compared:
        """What follows the talk's first question, a reply that the model sampled, and the second question."""
        text = self._spelled(reply_ids)
        usual = self._tokenizer.encode_inside(text)
        return self._compare_next(talk, "sampled", text, reply_ids, usual)

    def compare_split(self, talk: Conversation) -> list[Compared]:
        """The same for the talk's own first reply, split anyhow, and for its second half behind its first."""
        asked = self._encode(self._render(talk.texts[:1]))
        usual = self._tokenizer.encode_inside(talk.texts[1])[:MAX_REPLY]
        text = self._spelled(usual)
        half = max(at for at in range(len(usual) // 2 + 1) if at == 0 or self._begins_word(usual[at]))
        begun = self._replies.split(self._spelled(usual[:half]))
        target = usual[half:][:MAX_NEXT]
        return [
            self._compare_next(talk, "split", text, self._replies.split(text), usual),
            self._compare(talk, "split", "rest", [*asked, *usual[:half]], [*asked, *begun], target),
        ]

    def close(self) -> None:
        """Free the model."""
        self._runner.close()

    def _compare_next(
        self, talk: Conversation, way: str, text: str, ids: Sequence[int], usual: Sequence[int]
    ) -> Compared:
        question, _, again, answer = talk.texts[:4]
        asked = self._render([question])
        tail = self._encode(self._render([question, text, again])[len(asked) + len(text) :])
        before, target = self._encode(asked), self._tokenizer.encode_inside(answer)[:MAX_NEXT]
        return self._compare(talk, way, "next reply", [*before, *usual, *tail], [*before, *ids, *tail], target)

    def _compare(
        self, talk: Conversation, way: str, follows: str, usual: list[int], reused: list[int], target: list[int]
    ) -> Compared:
        return _compared(talk, way, follows, self._logits(usual, target), self._logits(reused, target), target)

    def _spelled(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode()

    def _begins_word(self, token_id: int) -> bool:
        return self._tokenizer.token_bytes(token_id)[:1] == b" "

    def _render(self, texts: Sequence[str]) -> str:
        roles = ("user", "assistant")
        return self._template.render([{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, parse_special=True)

    def _logits(self, prefix: Sequence[int], target: Sequence[int]) -> Float64:
        """Log-probabilities `[len(target), vocab]` of what comes at each place of `target` behind `prefix`."""
        logits = self._forward([*prefix, *target[:-1]], 0, len(target)).astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))

    def _forward(self, ids: Sequence[int], start: int, num_logits: int) -> Float32Array:
        """Compute ids from position `start` on, and give the logits of the last ones, a copy."""
        stop, step = start + len(ids), self._limits.max_num_tokens
        assert num_logits <= self._limits.max_num_logits
        for begin in range(start, stop - num_logits, step):
            end = min(begin + step, stop - num_logits)
            self._runner.forward(_batch(ids[begin - start : end - start], begin, wants_logits=False))
        begin = stop - num_logits
        return self._runner.forward(_batch(ids[begin - start :], begin, wants_logits=True)).copy()


def _batch(ids: Sequence[int], start: int, *, wants_logits: bool) -> Batch:
    positions = np.arange(start, start + len(ids), dtype=np.int32)
    rows = positions - np.int32(start)
    pages = np.arange(-(-(start + len(ids)) // PAGE_SIZE), dtype=np.int32)[None]
    wanted = rows if wants_logits else rows[:0]
    token_ids = np.array(ids, np.int32)
    return Batch(token_ids, positions, positions, np.zeros_like(rows), pages, positions + np.int32(1), wanted)


def _compared(
    talk: Conversation, ids: str, follows: str, usual: Float64, reused: Float64, target: Sequence[int]
) -> Compared:
    places = np.arange(len(target))
    return Compared(
        talk.texts[0],
        ids,
        follows,
        gain=float((reused[places, target] - usual[places, target]).mean()),
        usual=float(usual[places, target].mean()),
        kl=float((np.exp(usual) * (usual - reused)).sum(axis=-1).mean()),
        agreement=float((usual.argmax(axis=-1) == reused.argmax(axis=-1)).mean()),
    )


def summary(compared: Sequence[Compared]) -> list[dict[str, str | int | float]]:
    """Means over talks, each with twice its standard error; a talk's own samples are averaged first."""
    rows: list[dict[str, str | int | float]] = []
    for ids, follows in sorted({(one.ids, one.follows) for one in compared}):
        mine = [one for one in compared if (one.ids, one.follows) == (ids, follows)]
        talks = {one.talk: [other for other in mine if other.talk == one.talk] for one in mine}
        row: dict[str, str | int | float] = {"ids": ids, "follows": follows, "num_talks": len(talks)}
        row["num_replies"] = len(mine)
        for name in ("gain", "usual", "kl", "agreement"):
            values = np.array([np.mean([getattr(one, name) for one in found]) for found in talks.values()])
            error = 2 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
            row |= {name: float(values.mean()), f"{name}_error": error}
        rows.append(row)
    return rows


def sampled_replies(
    artifact: Artifact, talks: Sequence[Conversation], most: int
) -> list[tuple[Conversation, list[int]]]:
    """Answers to the first questions, `most` for each, whose ids are not the encoding of their text."""
    found = []
    with Engine(artifact, max_num_seqs=16) as engine:
        asked = [(talk, seed) for talk in talks for seed in range(most)]
        streams = [
            engine.stream_chat(
                [{"role": "user", "content": talk.texts[0]}],
                SamplingParams(temperature=1.0, max_tokens=MAX_REPLY, seed=number),
            )
            for number, (talk, _) in enumerate(asked)
        ]
        special = engine.tokenizer.profile.special_ids
        for (talk, _), stream in zip(asked, streams, strict=True):
            completion = stream.result()
            ids = [token_id for token_id in completion.token_ids if token_id not in special]
            spelled = b"".join(map(engine.tokenizer.token_bytes, ids))
            if spelled == completion.text.encode() and ids != engine.tokenizer.encode_inside(completion.text):
                found.append((talk, ids))
    return found


def _talks() -> list[Conversation]:
    """Of OASST, those of two questions and two replies, no question twice."""
    return list({talk.texts[0]: talk for talk in oasst(data_dir()) if len(talk.texts) >= 4}.values())


def main() -> None:
    """Compare, print and write `bench/results/text_quality.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--samples", type=int, default=5, help="answers that the model gives to each question")
    arguments = parser.parse_args()
    artifact, talks = Artifact.open(arguments.artifact), _talks()
    sampled = sampled_replies(artifact, talks, arguments.samples)
    quality = TextQuality(artifact)
    compared = [quality.compare_sampled(talk, ids) for talk, ids in sampled]
    compared += [one for talk in talks for one in quality.compare_split(talk)]
    quality.close()
    rows = summary(compared)
    for row in rows:
        print(row)
    num_sampled = len(talks) * arguments.samples
    print(write_results("text_quality", {"num_talks": len(talks), "num_sampled": num_sampled, "rows": rows}))


if __name__ == "__main__":
    main()
