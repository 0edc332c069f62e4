"""What `radixlm replay-kv` says of a log that keeps the laws, and of one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.kv_log.log import KVLog

from ..runtime.fake_model import Bench


@pytest.fixture
def log(tmp_path: Path) -> Path:
    kv_log = KVLog.open(tmp_path / "kv.jsonl", max_bytes=4000)
    bench = Bench(kv_log=kv_log)
    for seed in range(5):
        bench.add(f"r{seed}", [seed, *[1] * 40], SamplingParams(seed=seed, max_tokens=8, ignore_eos=True))
        bench.run()
    kv_log.close()
    return tmp_path / "kv.jsonl"


def test_a_log_that_keeps_the_laws_is_counted(runner: CliRunner, log: Path) -> None:
    files = list(log.parent.iterdir())
    num_lines = sum(len(file.read_text().splitlines()) for file in files)
    result = runner.invoke(cli, ["replay-kv", str(log)])
    assert result.exit_code == 0 and len(files) > 1
    assert f"{num_lines} lines in {len(files)} files are valid" in result.output
    assert "at the end: 0 requests, " in result.output and " of 16 pages free" in result.output


def test_the_first_line_that_breaks_a_law_is_shown_with_its_number(runner: CliRunner, log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    (number, *_) = [number for number, line in enumerate(lines) if '"event": "reserve"' in line]
    lines[number] = lines[number].replace('"pages": [', '"pages": [0, 0, ')
    log.write_text("".join(lines))
    result = runner.invoke(cli, ["replay-kv", str(log)])
    assert result.exit_code == 2 and result.output.count("\n") == 1
    assert f"kv.jsonl, line {number + 1}: it takes too many pages" in result.output
    assert '"event": "reserve"' in result.output


def test_an_empty_file_keeps_no_laws(runner: CliRunner, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    result = runner.invoke(cli, ["replay-kv", str(tmp_path / "empty.jsonl")])
    assert result.exit_code == 2 and "empty.jsonl has no line" in result.output


def test_a_file_that_is_none_is_bad_input(runner: CliRunner, tmp_path: Path) -> None:
    result = runner.invoke(cli, ["replay-kv", str(tmp_path / "nothing.jsonl")])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "nothing.jsonl" in result.output
