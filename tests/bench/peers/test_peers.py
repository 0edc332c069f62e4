"""Rounds, missing peers and the best one, with engines that are numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from radixlm.cli.bench.engine_timer import steady_tokens_per_s
from radixlm.compile.codegen.targets import TARGETS

from bench.limits import Limits
from bench.peers import comparison
from bench.peers.client import CompletionsClient, LlamaCppClient, Reply
from bench.peers.comparison import NO_TIME, READ_GB_PER_S, decode_share, join_runs, measure, missing_of
from bench.peers.contestants import OURS
from bench.peers.other_engines import (
    PLACES,
    DasLLAMA,
    IkLlamaCpp,
    LlamaCpp,
    control_ids,
    peers_of,
    places_for,
    words_of,
)
from bench.peers.scenarios import DECODE, PEERS, SCENARIOS, SIZES, START, Plan, Scenario, Values
from bench.prompts import Prompts
from bench.report.peers import Best, best_of

VOCABULARY = 300
THEIRS = ("one", "other")
Log = list[tuple[str, str, list[int]]]


class FakeEngine:
    """Remembers what it was asked, and answers how many questions there were; may fail at a scenario."""

    def __init__(self, name: str, log: Log, fails_at: str = "") -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def start(self, prompts: Prompts) -> Values:
        return self._answer(START.name, prompts)

    def measure(self, scenario: Scenario, prompts: Prompts) -> Values:
        return self._answer(scenario.name, prompts)

    def close(self) -> None:
        self.log.append((self.name, "close", [0]))

    def _answer(self, name: str, prompts: Prompts) -> Values:
        if name == self.fails_at:
            raise RuntimeError("it answered 500")
        self.log.append((self.name, name, prompts.ids(3)))
        return {name: float(len(self.log))}


def around(work: Callable[[], Values]) -> Any:
    return work(), Limits(2, 50.0, 40.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def run(rounds: int, monkeypatch: pytest.MonkeyPatch, fails_at: str = "", plan: Plan = PEERS) -> Any:
    monkeypatch.setattr("bench.peers.comparison._REST_S", 0)
    log: Log = []
    engines = [FakeEngine(OURS, log), FakeEngine("one", log), FakeEngine("other", log, fails_at)]
    values, failed = measure(engines, around, rounds, VOCABULARY, plan=plan)
    return values, failed, log


def test_every_engine_gets_the_same_prompts_in_a_round_and_others_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, log = run(2, monkeypatch)
    asked = {name: [ids for who, what, ids in log if (who, what) == (name, "decode")] for name in (OURS, *THEIRS)}
    assert asked[OURS] == asked["one"] == asked["other"]
    assert asked[OURS][0] != asked[OURS][1]
    assert max(max(ids) for _, _, ids in log) < VOCABULARY


def test_engines_alternate_and_take_turns_at_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, log = run(3, monkeypatch)
    names = [name for name, scenario, _ in log if scenario == "prefill_512"]
    orders = [tuple(names[i : i + 3]) for i in range(0, 9, 3)]
    assert {order[0] for order in orders} == {OURS, *THEIRS}
    assert all(set(order) == {OURS, *THEIRS} for order in orders)


def test_every_round_begins_with_a_start_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values, failed, log = run(2, monkeypatch)
    assert not failed and next(what for who, what, _ in log if who == OURS) == START.name
    for name in (OURS, *THEIRS):
        assert {len(values[name][scenario.name]) for scenario in SCENARIOS} == {2} == {len(values[name][START.name])}
    assert values[OURS][READ_GB_PER_S] == [50.0] * 2


def test_of_large_models_each_engine_is_asked_all_while_no_other_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, log = run(2, monkeypatch, plan=SIZES)
    alive: set[str] = set()
    blocks: list[str] = []
    for name, what, _ in log:
        alive = alive - {name} if what == "close" else alive | {name}
        if what != "close":
            assert alive == {name}
            blocks += [] if blocks[-1:] == [name] else [name]
    assert blocks == [OURS, "one", "other", "one", "other", OURS]


def test_what_takes_minutes_is_asked_in_the_first_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    values, _, _ = run(3, monkeypatch, plan=SIZES)
    for scenario in SIZES.scenarios:
        assert len(values["one"][scenario.name]) == (1 if scenario.is_once else 3)
    assert {each.name for each in SIZES.scenarios if each.is_once} == {"prefill_8000", "prefill_32000"}


def test_what_fails_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    values, failed, _ = run(2, monkeypatch, fails_at="decode")
    assert failed == {"other: decode": "RuntimeError: it answered 500"}
    assert len(values["other"]["prefill_512"]) == 2 and "decode" not in values["other"]
    assert len(values["one"]["decode"]) == 2


def test_a_peer_that_is_not_there_is_named(tmp_path: Path) -> None:
    places = dict.fromkeys(PLACES, tmp_path / "nowhere")
    (tmp_path / "a.Q4_1.gguf").touch()
    peers = peers_of(tmp_path / "a.Q4_1.gguf", tmp_path / "a.Q4_0.gguf", places, tmp_path, 2)
    why = {peer.name: peer.why_missing for peer in peers}
    assert why["ik_llama.cpp, same file"] == f"there is no {tmp_path / 'nowhere' / 'llama-server'}"
    assert all(why[name] for name in why if "wheel" not in name)
    assert "OpenVINO, same file" in why
    others = peers_of(tmp_path / "a.Q4_K_M.gguf", tmp_path / "a.Q4_0.gguf", places, tmp_path, 2)
    assert "OpenVINO, same file" not in {peer.name for peer in others}


def test_peers_of_a_target_are_those_that_were_built_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "find_target", lambda name: TARGETS["x86-64-v4" if name == "native" else name])
    places = places_for("x86-64-v3")
    assert places["llama.cpp"] == Path(".cache/llama.cpp-x86-64-v3") and places["openvino"] == PLACES["openvino"]
    assert places_for("native") == PLACES
    peers = peers_of(tmp_path / "a.Q4_1.gguf", tmp_path / "a.Q4_0.gguf", places, tmp_path, 2)
    held = {peer.name for peer in peers if peer.is_held}
    assert held == {"llama.cpp, same file", "llama.cpp, Q4_0", "its wheel, Q4_0", "ik_llama.cpp, same file"}
    reasons = missing_of(peers, (), "x86-64-v3")
    assert all("not x86-64-v3" in reasons[peer.name] for peer in peers if not peer.is_held)


def test_a_machines_own_target_holds_no_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "find_target", lambda name: TARGETS["x86-64-v3"])
    assert places_for("x86-64-v3") == PLACES
    peers = peers_of(tmp_path / "a.Q4_1.gguf", tmp_path / "a.Q4_0.gguf", PLACES, tmp_path, 2)
    assert not any("not x86-64-v3" in reason for reason in missing_of(peers, (), "x86-64-v3").values())


def test_single_streams_have_settings_of_their_own(tmp_path: Path) -> None:
    by_name = {scenario.name: scenario for scenario in SCENARIOS}
    for kind in (LlamaCpp, IkLlamaCpp):
        peer = kind("name", ("server",), tmp_path, 2)
        assert len(peer.commands(by_name["decode"])) == 2
        [streams], [prompt] = peer.commands(by_name["streams_8"]), peer.commands(by_name["prefill_512"])
        assert streams[streams.index("--parallel") + 1] == "8" and "-rtr" not in streams + prompt


def test_one_setting_serves_all_rows_where_one_server_lives(tmp_path: Path) -> None:
    for kind in (LlamaCpp, IkLlamaCpp):
        peer = kind("name", ("server",), tmp_path, 2)
        peer.one_server = True
        single = [each for each in SIZES.scenarios if each.num_streams == 1 and each.context == 8192]
        assert len({command for scenario in single for command in peer.commands(scenario)}) == 1
        assert ("-rtr" in peer.commands(single[0])[0]) == (kind is IkLlamaCpp)


def test_a_first_start_finds_nothing_that_dasllama_has_made_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made, other = (tmp_path / name for name in ("a.gguf", "a.gguf.cpu-x86.dlim", "b.gguf.cpu-x86.dlim"))
    for path in (model, made, other):
        path.touch()
    monkeypatch.setattr(DasLLAMA, "start", lambda self, prompts: {START.name: float(made.exists())})
    assert DasLLAMA("it", tmp_path, model, 2).first_start(model, Prompts(0, VOCABULARY)) == {"first_start": 0.0}
    assert other.exists()


def test_words_are_tokens_of_their_own(smollm2_gguf: Path) -> None:
    words = words_of(smollm2_gguf)
    assert len(words) > 10_000 and all(word[0] == " " and word[1:].isalpha() for word in words)


def test_peers_that_were_not_asked_for_are_named(tmp_path: Path) -> None:
    peers = [LlamaCpp("one", ("server",), tmp_path, 2), LlamaCpp("other", ("server",), tmp_path / "nothing", 2)]
    assert missing_of(peers, ["other"]) == {"one": "not asked for", "other": f"there is no {tmp_path / 'nothing'}"}
    assert missing_of(peers, []) == {"other": f"there is no {tmp_path / 'nothing'}"}


def test_rounds_are_added_to_those_of_the_last_run() -> None:
    def figures(decode: float, others: dict[str, Any], missing: dict[str, str]) -> dict[str, Any]:
        values = {OURS: {"decode": [decode], READ_GB_PER_S: [20.0]}, **others}
        return {"values": values, "missing": missing, "decode_bytes_per_token": 100_000_000}

    before = figures(100.0, {"one": {"decode": [1.0]}}, {"other": "not there"}) | {"origin": {"commit": "a"}}
    found = join_runs(before, figures(50.0, {"other": {"decode": [2.0]}}, {"one": "not asked for"}))
    assert found["values"][OURS]["decode"] == [100.0, 50.0]
    assert found["values"]["one"] == {"decode": [1.0]} and found["values"]["other"] == {"decode": [2.0]}
    assert (
        found["missing"] == {} and found["decode_bandwidth_share"] == 0.375 and found["earlier"] == [before["origin"]]
    )


def test_why_a_row_has_no_value_is_kept_until_it_has_one() -> None:
    """Rounds that were added forgot it, and the row had a dash."""

    def figures(others: dict[str, Any], missing: dict[str, str]) -> dict[str, Any]:
        return {"values": {OURS: {"start": [1.0]}, "one": others}, "missing": missing, "decode_bytes_per_token": 1}

    before = figures({"decode": [1.0]}, {"one: chat": "it failed", "one: cached": NO_TIME})
    found = join_runs(before, figures({"decode": [1.0], "cached": [2.0]}, {"one": "not asked for"}))
    assert found["missing"] == {"one: chat": "it failed"}


def test_ends_of_replies_are_banned_where_an_engine_knows_only_one(smollm2_gguf: Path) -> None:
    """ik_llama.cpp ended replies of Qwen2.5-Coder after 8 tokens, and had no figures of streams and chats."""
    banned = control_ids(smollm2_gguf)
    assert {0, 1, 2} <= set(banned) and len(banned) < 100
    assert [2, False] in LlamaCppClient(0, banned).body([5], 3)["logit_bias"]
    assert "logit_bias" not in LlamaCppClient(0).body([5], 3)


def test_the_best_peer_is_named_also_where_it_is_ahead() -> None:
    values = {OURS: {"decode": [80.0, 90.0, 100.0]}, "one": {"decode": [100.0]}, "other": {"decode": [120.0, 60.0]}}
    assert best_of(values, DECODE) == Best("one", 100.0, 0.9)
    times = {OURS: {"start": [1.0]}, "one": {"start": [4.0]}, "other": {"start": [2.0, 2.0]}}
    assert best_of(times, START) == Best("other", 2.0, 2.0)
    assert best_of({OURS: {"start": [1.0]}, "one": {}}, START) is None
    assert best_of({"one": {"start": [1.0]}}, START) is None


def test_a_share_is_of_the_bandwidth_of_its_round() -> None:
    values = {OURS: {"decode": [100.0, 50.0], READ_GB_PER_S: [20.0, 20.0]}}
    assert decode_share(values, bytes_per_token=100_000_000) == 0.375
    assert decode_share({OURS: {}}, bytes_per_token=1) is None


def test_nothing_begins_after_the_deadline() -> None:
    log: Log = []
    values, failed = measure([FakeEngine(OURS, log)], around, 2, VOCABULARY, deadline=0.0)
    assert (values, log) == ({OURS: {}}, [])
    assert set(failed.values()) == {NO_TIME} and len(failed) == 1 + len(SCENARIOS) and f"{OURS}: decode" in failed


def test_steady_speed_leaves_out_what_not_all_streams_take_part_in() -> None:
    late = [10.0 + i for i in range(5)]
    early = [5.0 + i for i in range(8)]  # until 12.0
    assert steady_tokens_per_s([early, late]) == 2.0
    with pytest.raises(ValueError, match="ask for more tokens"):
        steady_tokens_per_s([[0.0, 1.0], [2.0, 3.0]])


def test_streams_that_never_ran_together_have_a_total_and_no_steady_speed() -> None:
    """One run of 50 streams ended in this error, and its figures were lost."""

    class Staggered(CompletionsClient):
        def ask_all(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Reply]:
            ends = [float(2 * number) for number in range(1, len(prompts) + 1)]
            return [Reply(0.0, [end - 1, end], [1, 2], "ab") for end in ends]

    (scenario,) = (each for each in SCENARIOS if each.name == "streams_8")
    assert scenario.measure(Staggered(0), Prompts(0, VOCABULARY)) == {"streams_8": 8 * 128 / 16}
