"""The history of attention, held against one that keeps every look in a list."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.errors import EngineError
from radixlm.runtime.extras.approximate.attention_scores import (
    DECAY,
    PASS_RUN_UP,
    STRIDE,
    AttentionScores,
    ScoredRunner,
    stride_of,
)
from radixlm.runtime.model.batch import Batch, PageCopy

from ...fake_model import VOCAB_SIZE
from .fake_scored_model import NUM_HEADS, NUM_LAYERS, WEIGHTS, FakeScoredModel

NUM_PAGES = 30


def batch_of(*parts: tuple[Sequence[int], Sequence[int], int], wants_logits: bool = True) -> Batch:
    """One step: of each part the tokens, the pages of its sequence, and the position of the first of the tokens."""
    width = max(len(pages) for _, pages, _ in parts)
    ids, positions, slots, rows = list[int](), list[int](), list[int](), list[int]()
    table = np.zeros((len(parts), width), np.int32)
    for number, (tokens, pages, start) in enumerate(parts):
        table[number, : len(pages)] = pages
        for position, token in enumerate(tokens, start):
            ids.append(token)
            positions.append(position)
            slots.append(pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            rows.append(number)
    int32 = [np.array(values, np.int32) for values in (ids, positions, slots, rows)]
    return Batch(*int32, table, int32[1] + np.int32(1), np.zeros(int(wants_logits), np.int32))


@dataclass
class Slow:
    """Of each slot its token, the looks since the last fold, and the means of its uses, and of its own passes."""

    tokens: dict[int, int] = field(default_factory=dict)
    looks: dict[int, list[np.ndarray]] = field(default_factory=dict)
    uses: dict[int, list[np.ndarray]] = field(default_factory=dict)
    passes: dict[int, list[np.ndarray]] = field(default_factory=dict)

    def step(self, token_ids: Sequence[int], pages: Sequence[int], start: int, *, stride: int | None) -> None:
        slots = [page * PAGE_SIZE + row for page in pages for row in range(PAGE_SIZE)]
        self.forget(slots[start : start + len(token_ids)])
        self.tokens |= zip(slots[start:], token_ids, strict=False)
        if stride is None or (stride > 1 and len(token_ids) == 1):
            return
        for position, token in list(enumerate(token_ids, start))[::-1][::stride]:
            for slot in slots[: max(0, position + 1 - (0 if stride == 1 else 16))]:
                self.looks[slot].append(WEIGHTS[:, :, token, self.tokens[slot]])

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.looks[slot], self.uses[slot], self.passes[slot] = [], [], []

    def copy(self, copy: PageCopy) -> None:
        for row in range(PAGE_SIZE):
            source, target = copy.src_page * PAGE_SIZE + row, copy.dst_page * PAGE_SIZE + row
            self.forget([target])
            if row < copy.num_rows:
                self.uses[target], self.passes[target] = list(self.uses[source]), list(self.passes[source])
                self.tokens[target] = self.tokens[source]

    def fold(self, pages: Sequence[int], num_reused: int) -> None:
        for position in range(len(pages) * PAGE_SIZE):
            slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            if self.looks.get(slot):
                if position < num_reused:
                    self.uses[slot].append(np.mean(self.looks[slot], axis=0))
                else:
                    self.passes[slot].append(np.sum(self.looks[slot], axis=0) / (len(self.looks[slot]) + PASS_RUN_UP))
                self.looks[slot] = []

    def score(self, slot: int) -> np.ndarray:
        uses, passes = self.uses.get(slot, []), self.passes.get(slot, [])
        score = np.sum(passes, axis=0) if passes else np.zeros((NUM_LAYERS, NUM_HEADS))
        if uses:
            score = score + np.average(uses, axis=0, weights=[DECAY ** (len(uses) - 1 - i) for i in range(len(uses))])
        return np.asarray(score)


@pytest.mark.parametrize("seed", range(6))
def test_scores_are_those_of_every_look_kept_in_a_list(seed: int) -> None:
    chance = random.Random(seed)
    model = FakeScoredModel(NUM_PAGES)
    runner, slow = ScoredRunner(model), Slow()
    free, sequences = list(range(NUM_PAGES)), list[tuple[list[int], int]]()  # pages and length of each

    def tokens(count: int) -> list[int]:
        return [chance.randrange(VOCAB_SIZE) for _ in range(count)]

    def grown(pages: list[int], length: int) -> list[int]:
        while len(pages) * PAGE_SIZE < length:
            pages.append(free.pop(chance.randrange(len(free))))
        return pages

    for _ in range(60):
        if sequences and (len(free) < 10 or chance.random() < 0.1):
            free += sequences.pop(chance.randrange(len(sequences)))[0]
            continue
        kind = chance.choice(["prompt", "prompt", "prompt", "decode", "copy", "load", "fold", "fold"])
        if kind == "load":
            pages = grown([], chance.randrange(1, 3) * PAGE_SIZE)
            runner.write_pages(pages, np.zeros((len(pages), PAGE_SIZE * 8), np.uint8))
            for page in pages:
                slots = range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
                slow.forget(slots)
                for slot in slots:
                    slow.tokens[slot] = int(model.tokens[slot])
            sequences.append((pages, len(pages) * PAGE_SIZE))
        elif kind == "prompt" or not sequences:
            old = chance.sample(sequences, min(len(sequences), chance.randrange(3)))
            some = [*old, ([], 0)] if not old or chance.random() < 0.5 else old
            parts = []
            for pages, length in some:
                new = tokens(chance.choice([chance.randrange(2, 20), chance.randrange(20, 50)]))
                parts.append((new, grown(pages, length + len(new)), length))
                sequences = [each for each in sequences if each[0] is not pages]
                sequences.append((pages, length + len(new)))
            wants_logits, total = chance.random() < 0.7, sum(len(new) for new, _, _ in parts)
            runner.forward(batch_of(*parts, wants_logits=wants_logits))
            for new, pages, length in parts:
                slow.step(new, pages, length, stride=stride_of(total, ends_prompt=wants_logits))
        elif kind == "decode":
            pages, length = sequences.pop()
            new = tokens(1)
            runner.forward(batch_of((new, grown(pages, length + 1), length)))
            slow.step(new, pages, length, stride=None)
            sequences.append((pages, length + 1))
        elif kind == "copy":
            pages, length = chance.choice(sequences)
            copy = PageCopy(pages[-1], free.pop(), (length - 1) % PAGE_SIZE + 1)
            runner.copy_rows([copy])
            model.tokens.reshape(-1, PAGE_SIZE)[copy.dst_page] = model.tokens.reshape(-1, PAGE_SIZE)[copy.src_page]
            slow.copy(copy)
            sequences.append(([copy.dst_page], copy.num_rows))
        else:
            pages, length = chance.choice(sequences)
            num_reused = chance.randrange(length + 1)
            runner.scores.fold(pages, num_reused=num_reused)
            slow.fold(pages, num_reused)
        for pages, length in sequences:
            scores = runner.scores.of(pages)
            for position in range(length):
                slot = pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
                np.testing.assert_allclose(scores[:, :, position], slow.score(slot), rtol=2e-5, atol=1e-7)
    assert model.num_scored > 5


@pytest.mark.parametrize("count", [1, 16, 17, 40, 64, 65, 128, 512])
def test_of_a_question_sixteen_tokens_are_scored_or_one_of_eight(count: int) -> None:
    stride = stride_of(count, ends_prompt=True)
    assert count // stride <= max(16, count // STRIDE)
    assert count > 16 or stride == 1, "of a short question all"
    assert stride_of(count, ends_prompt=False) == STRIDE


def test_a_pruned_sequence_leaves_no_trace_on_what_it_shares() -> None:
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
    runners = [ScoredRunner(FakeScoredModel(4)) for _ in range(2)]
    for runner in runners:
        runner.forward(batch_of((ids[:10], [2], 0)))  # few enough for all to be scored
        runner.forward(batch_of((ids[10:], [2, 0], 10)))
    own = np.array([7, 7, 7], np.int32)
    positions = np.arange(40, 43, dtype=np.int32)  # behind 16 exact rows and none of the 24 tokens after them
    slots, lengths = np.arange(16, 19, dtype=np.int32), np.arange(17, 20, dtype=np.int32)
    pruned = Batch(own, positions, slots, np.zeros(3, np.int32), np.array([[2, 1]], np.int32), lengths, slots[:0])
    with pytest.MonkeyPatch.context() as patch:  # the fake insists on plain rows
        patch.setattr(FakeScoredModel, "forward", lambda self, batch: np.zeros((0, VOCAB_SIZE), np.float32))
        runners[0].forward_scored(pruned)
    for runner in runners:
        runner.scores.fold([2, 0, 1], num_reused=0)
    assert np.array_equal(*(runner.scores.of([2, 0, 1]) for runner in runners))
    assert runners[0].scores.of([2]).all() and not runners[0].scores.of([1]).any()


def test_numbers_that_went_wrong_are_no_scores() -> None:
    mass, counts = np.zeros((1, 1, 2, PAGE_SIZE), np.float32), np.zeros((2, PAGE_SIZE), np.int32)
    scores = AttentionScores(mass, counts)
    for value in (1.0, np.nan, np.inf):
        with scores.recording(batch_of((range(16), [1], 0)).arrays):
            mass[:, :, 1] += np.float32(value)
            counts[1] += np.arange(16, 0, -1, dtype=np.int32)
        scores.fold([1], num_reused=16)
        assert not mass.any() and not counts.any()
    assert np.array_equal(scores.of([1])[0, 0], 1 / np.arange(16, 0, -1, dtype=np.float32))


def test_a_use_weighs_more_than_the_first_pass_which_is_never_forgotten() -> None:
    mass, counts = np.zeros((1, 1, 2, PAGE_SIZE), np.float32), np.zeros((2, PAGE_SIZE), np.int32)
    scores = AttentionScores(mass, counts)
    with scores.recording(batch_of((range(16), [0], 0)).arrays):
        mass[..., 0, 0] = counts[0, 0] = 16
    scores.fold([0], num_reused=0)
    own = 16 / (16 + PASS_RUN_UP)
    assert scores.of([0])[0, 0, :2].tolist() == pytest.approx([own, 0.0])
    for _ in range(9):
        with scores.recording(batch_of((range(4), [0, 1], 16)).arrays):
            mass[..., 0, 1] = counts[0, 1] = 4
        scores.fold([0], num_reused=16)
        assert scores.of([0])[0, 0, :2].tolist() == pytest.approx([own, 1.0])


def test_a_runner_without_mass_cannot_be_scored() -> None:
    model = FakeScoredModel(2)
    model.close()
    with pytest.raises(EngineError, match="keep_scores"):
        ScoredRunner(model)
