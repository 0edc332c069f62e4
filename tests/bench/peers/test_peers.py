"""Rounds, ratios and bars, with engines that are numbers."""

from __future__ import annotations

import pytest

from bench.engine import figures
from bench.engine.figures import Figure
from bench.limits import Limits
from bench.peers.__main__ import FIGURES, READ_GB_PER_S, decode_shares, measure
from bench.peers.bars import OURS, PEERS, Q4_0, RATIO_BARS, SAME, ratios, verdicts
from bench.prompts import Prompts
from bench.timing import Spread, steady_tokens_per_s

VOCABULARY = 300


class FakeEngine:
    """Remembers what it was asked, and answers how many questions there were."""

    def __init__(self, name: str, log: list[tuple[str, str, list[int]]]) -> None:
        self.name, self.log = name, log

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        self.log.append((self.name, figure.name, prompts.ids(3)))
        return {figure.name: float(len(self.log))}

    def close(self) -> None:
        pass


class FakeMeter:
    def around(self, work, runs: int = 10):  # type: ignore[no-untyped-def]
        return work(), Limits(2, 50.0, 40.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def run(rounds: int, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr("bench.peers.__main__._REST_S", 0)
    log: list[tuple[str, str, list[int]]] = []
    engines = [FakeEngine(name, log) for name in (OURS, *PEERS)]
    return measure(engines, FakeMeter(), rounds, VOCABULARY), log  # type: ignore[arg-type]


def test_every_engine_gets_the_same_prompts_in_a_round_and_others_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = run(2, monkeypatch)
    prompts: dict[str, list[list[int]]] = {}
    for name, figure, ids in log:
        if figure == "decode":
            prompts.setdefault(name, []).append(ids)
    assert prompts[OURS] == prompts[SAME] == prompts[Q4_0]
    assert len({tuple(ids) for ids in prompts[OURS]}) == 3  # the round that warms up, and two


def test_engines_alternate_and_take_turns_at_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = run(4, monkeypatch)
    names = [name for name, figure, _ in log if figure == "prefill_512"]
    count = 1 + len(PEERS)
    orders = [tuple(names[i : i + count]) for i in range(count, len(names), count)]
    assert {order[0] for order in orders} == {OURS, *PEERS}
    assert all(set(order) == {OURS, *PEERS} for order in orders)


def test_the_round_that_warms_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = run(4, monkeypatch)
    for name in (OURS, *PEERS):
        counts = {figure.name: len(values[name][figure.name]) for figure in FIGURES}
        assert counts.pop("memory") == 2
        assert set(counts.values()) == {4}
    assert values[OURS][READ_GB_PER_S] == [50.0] * 4


def test_a_ratio_is_of_one_round_and_better_is_more() -> None:
    values = {OURS: {"decode": [200, 100], "start": [1.0, 1.0]}, SAME: {"decode": [100, 100], "start": [2.0, 4.0]}}
    assert ratios(values, figures.DECODE, (SAME,)) == Spread(1.0, 1.5, 2.0, 2)
    assert ratios(values, figures.START, (SAME,)) == Spread(2.0, 3.0, 4.0, 2)


def test_the_best_peer_is_the_one_that_counts() -> None:
    peers = {SAME: {"streams_8": [50.0]}, Q4_0: {"streams_8": [100.0]}}
    assert ratios({OURS: {"streams_8": [370.0]}, **peers}, figures.STREAMS_8, (SAME, Q4_0)).median == 3.7


def test_prompts_are_of_the_models_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = run(2, monkeypatch)
    assert max(max(ids) for _, _, ids in log) < VOCABULARY


def test_every_bar_gets_a_verdict() -> None:
    names = [figure.name for figure in FIGURES]
    values = {name: {figure: [1.0] for figure in names} for name in (OURS, *PEERS)}
    found = verdicts(values, decode_bandwidth_share=0.76)
    assert len(found) == len(RATIO_BARS) + 1
    met = {verdict.bar for verdict in found if verdict.is_met}
    assert met == {"decode, batch 1: share of read bandwidth"}


def test_a_share_is_of_the_bandwidth_of_its_round() -> None:
    values = {OURS: {"decode": [100.0, 50.0], READ_GB_PER_S: [20.0, 20.0]}}
    assert decode_shares(values, bytes_per_token=100_000_000) == [0.5, 0.25]


def test_steady_speed_leaves_out_what_not_all_streams_take_part_in() -> None:
    late = [10.0 + i for i in range(5)]
    early = [5.0 + i for i in range(8)]  # until 12.0
    assert steady_tokens_per_s([early, late]) == 2.0
    with pytest.raises(ValueError, match="ask for more tokens"):
        steady_tokens_per_s([[0.0, 1.0], [2.0, 3.0]])
