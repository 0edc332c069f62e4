"""`radixlm cache` shows how many kernels are kept, and removes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.compile.codegen.kernel_cache import KernelCache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    monkeypatch.setenv("RADIXLM_KERNEL_CACHE", str(tmp_path / "kernels"))
    return KernelCache.of_user()


def test_it_shows_the_folder_and_clears_it(cache: KernelCache) -> None:
    for number in range(3):
        cache.put(f"{number:032x}", bytes(1_000_000))
    shown = CliRunner().invoke(cli, ["cache"])
    assert shown.exit_code == 0
    assert str(cache.directory) in shown.output and "3, 3.0 MB" in shown.output
    cleared = CliRunner().invoke(cli, ["cache", "--clear", "--json"])
    assert cleared.exit_code == 0
    report = json.loads(cleared.output)
    assert (report["kernels"]["num_objects"], report["removed"]["num_objects"]) == (0, 3)


def test_a_cache_that_was_never_used_is_empty(cache: KernelCache) -> None:
    assert "0, 0.0 MB" in CliRunner().invoke(cli, ["cache"]).output
    assert CliRunner().invoke(cli, ["cache", "--clear"]).exit_code == 0
