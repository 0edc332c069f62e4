"""`radixlm bench`: what it measures within its time, and the shares that follow from rates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from radixlm.cli.bench.command import table
from radixlm.cli.bench.figures import FIGURES, Figure, Measured, Rounds, decode_bytes
from radixlm.cli.main import cli
from radixlm.runtime.artifact import Artifact, write_manifest
from radixlm.runtime.artifact.manifest import Manifest
from radixlm.runtime.model.machine_limits import LimitsMeter, MachineLimits

MOST_ROUNDS = 5


class FakeMachine:
    """An engine, a meter and a clock in one: time passes as the rates say."""

    def __init__(self, prefill_per_s: float, decode_per_s: float) -> None:
        self.now = 0.0
        self.prefill_per_s, self.decode_per_s = prefill_per_s, decode_per_s
        self.cached: list[Sequence[int]] = []
        self.began: list[float] = []

    def clock(self) -> float:
        return self.now

    def read_gb_per_s(self) -> float:
        return 10.0

    def prefill(self, prompt: Sequence[int]) -> float:
        assert prompt not in self.cached, "the prompt was computed before"
        self.cached.append(prompt)
        self.began.append(self.now)
        return self._pass(len(prompt) / self.prefill_per_s)

    def decode(self, prompt: Sequence[int], num_tokens: int) -> float:
        self.began.append(self.now)
        self._pass((0 if prompt in self.cached else len(prompt)) / self.prefill_per_s)
        return (num_tokens - 1) / self._pass((num_tokens - 1) / self.decode_per_s)

    def streams(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        self.began.append(self.now)
        self._pass(sum(map(len, prompts)) / self.prefill_per_s + num_tokens / self.decode_per_s)
        return len(prompts) * self.decode_per_s

    def _pass(self, seconds: float) -> float:
        self.now += seconds
        return seconds


def measured(
    machine: FakeMachine, manifest: Manifest, seconds: float, context: int
) -> tuple[list[Measured], list[str]]:
    """Figures, and the lines that were told."""
    told: list[str] = []
    fakes: Any = machine
    rounds = Rounds(
        fakes,
        manifest,
        fakes,
        integer_gop_per_s=100.0,
        context_length=context,
        seconds=seconds,
        tell=told.append,
        clock=machine.clock,
    )
    return rounds.measure(), told


@pytest.fixture(scope="module")
def manifest(tiny_artifact: Path) -> Manifest:
    return Artifact.open(tiny_artifact).manifest


@given(
    st.floats(1, 1e5), st.floats(0.5, 1e3), st.floats(0, 200), st.sampled_from([64, 600, 2080, 2081, 8192]), st.data()
)
def test_time_and_context_decide_what_is_measured_how_often(
    manifest: Manifest, prefill_per_s: float, decode_per_s: float, seconds: float, context: int, data: st.DataObject
) -> None:
    machine = FakeMachine(prefill_per_s, decode_per_s)
    found, told = measured(machine, manifest, seconds, context)
    names = [each.name for each in found]
    for figure in FIGURES:
        fits = figure.num_prompt + figure.num_reply <= context
        is_quick = figure.expected_s(prefill_per_s, decode_per_s) <= seconds
        if fits and is_quick != (figure.name in names):  # the warm-up tells the rates, up to rounding
            assert figure.expected_s(prefill_per_s, decode_per_s) == pytest.approx(seconds)
        assert (figure.name in names) != any(line.startswith(f"{figure.name} is skipped") for line in told)
    assert all(1 <= len(each.tokens_per_s) <= MOST_ROUNDS for each in found)
    expected = {"prefill": prefill_per_s, "decode": decode_per_s, "8 requests": 8 * decode_per_s}
    for each in found:
        rate = next(rate for name, rate in expected.items() if each.name.startswith(name))
        assert each.tokens_per_s == pytest.approx([rate] * len(each.tokens_per_s))


def test_a_slow_machine_measures_once_and_a_quick_one_five_times(manifest: Manifest) -> None:
    slow, _ = measured(FakeMachine(60, 10), manifest, 50, 8192)
    assert [len(each.tokens_per_s) for each in slow] == [1] * len(FIGURES)
    quick, _ = measured(FakeMachine(2000, 200), manifest, 50, 8192)
    assert [len(each.tokens_per_s) for each in quick] == [MOST_ROUNDS] * len(FIGURES)


def test_shares_are_of_the_work_that_the_manifest_tells(manifest: Manifest) -> None:
    weights, model = manifest.quantization.token_weights, manifest.model
    assert weights is not None
    found, _ = measured(FakeMachine(2000, 200), manifest, 50, 8192)
    prefill, _, decode, later, together = found
    head = model.vocab_size * model.hidden_size
    gop_per_s = 2000 * 2 * (weights - head + head / 512) / 1e9
    assert prefill.gop_per_s == pytest.approx([gop_per_s] * MOST_ROUNDS)
    assert prefill.integer_share == pytest.approx([gop_per_s / 100] * MOST_ROUNDS)
    assert together.gop_per_s == pytest.approx([8 * 200 * 2 * weights / 1e9] * MOST_ROUNDS)
    assert prefill.gb_per_s == together.gb_per_s == []
    for figure, context in ((decode, 32), (later, 2064)):
        assert figure.gb_per_s == pytest.approx([200 * decode_bytes(manifest, context) / 1e9] * MOST_ROUNDS)
        assert figure.memory_share == pytest.approx([figure.gb_per_s[0] / 10] * MOST_ROUNDS)


def test_a_token_reads_its_weights_and_the_rows_that_it_sees(manifest: Manifest) -> None:
    weights, kv = manifest.quantization.token_bytes, manifest.kv
    assert weights is not None
    assert decode_bytes(manifest, 0) == weights
    assert decode_bytes(manifest, 160) == weights + 10 * kv.page_bytes
    first, *rest = manifest.model.layers
    windowed = structs.replace(first, mixer=structs.replace(first.mixer, window=32))
    model = structs.replace(manifest.model, layers=(windowed, *rest))
    less = 8 * kv.of_layer(0).page_items * kv.itemsize
    assert decode_bytes(structs.replace(manifest, model=model), 160) == decode_bytes(manifest, 160) - less


def test_an_artifact_without_token_weights_has_no_integer_shares(manifest: Manifest) -> None:
    older = structs.replace(manifest, quantization=structs.replace(manifest.quantization, token_weights=None))
    found, _ = measured(FakeMachine(2000, 200), older, 50, 8192)
    assert [each.integer_share for each in found] == [[]] * len(FIGURES)
    assert all(len(set(map(len, lines))) == 1 for lines in [list(table(found))])


def test_the_command_measures_a_real_model(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "1")  # and as it was, afterwards
    longer = Figure("8 requests decode", 32, 257, 8)  # shorter replies may end before all have begun
    monkeypatch.setattr("radixlm.cli.bench.figures.FIGURES", (FIGURES[2], longer))
    done = CliRunner().invoke(cli, ["bench", str(tiny_artifact), "--seconds", "5", "--threads", "1", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["limits"]["num_threads"] == 1
    assert min(found["limits"]["read_gb_per_s"]["1"], found["limits"]["integer_gop_per_s"]["1"]) > 0
    decode = next(figure for figure in found["figures"] if figure["name"] == "decode")
    assert min(decode["tokens_per_s"] + decode["memory_share"] + decode["integer_share"]) > 0


def test_a_table_has_a_row_for_each_figure(manifest: Manifest) -> None:
    found, _ = measured(FakeMachine(2000, 200), manifest, 50, 8192)
    head, *rows = table(found)
    assert head.split() == ["tokens/s", "min-max", "GB/s", "of", "memory", "GOP/s", "of", "integers", "rounds"]
    assert rows[0].startswith("prefill 512 ")
    assert "2000.0-2000.0" in rows[0]
    assert [row.split()[-1] for row in rows] == [str(MOST_ROUNDS)] * len(FIGURES)


def test_an_artifact_without_the_loops_is_to_be_compiled_again(tiny_artifact: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_artifact, tmp_path / "older.radixlm"))
    manifest = Artifact.open(path).manifest
    module = structs.replace(manifest.module, entry_points=("forward", "top_logits", "copy_pages"))
    write_manifest(path, structs.replace(manifest, module=module))
    done = CliRunner().invoke(cli, ["bench", str(path)])
    assert done.exit_code == 2
    assert "compile it again" in done.output


def test_the_better_of_two_measurements_counts() -> None:
    one = MachineLimits(2, {1: 10.0, 2: 15.0}, 12.0, {1: 100.0, 2: 180.0}, 1.5)
    other = MachineLimits(2, {1: 9.0, 2: 19.0}, 13.0, {1: 90.0, 2: 200.0}, 1.0)
    expected = MachineLimits(2, {1: 10.0, 2: 19.0}, 13.0, {1: 100.0, 2: 200.0}, 1.0)
    assert one.or_better(other) == other.or_better(one) == expected
    assert asdict(expected)["read_gb_per_s"] == {1: 10.0, 2: 19.0}


def test_bandwidth_is_measured_for_powers_of_two_and_all_threads(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    limits = LimitsMeter(Artifact.open(tiny_artifact), read_bytes=1 << 20).measure()
    assert list(limits.read_gb_per_s) == list(limits.integer_gop_per_s) == [1, 2, 3]
    assert min(limits.launch_us, limits.weights_gb_per_s, *limits.read_gb_per_s.values()) > 0
