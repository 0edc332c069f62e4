"""`radixlm verify-bits` prints one digest for an artifact, however many threads compute it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.model.logits_digest import logits_digest, usual_id

from ..conftest import REPOSITORY


def printed(runner: CliRunner, artifact: Path, *options: str) -> dict[str, str]:
    result = runner.invoke(cli, ["verify-bits", str(artifact), *options])
    assert result.exit_code == 0, result.output
    return rows(result.output)


def rows(output: str) -> dict[str, str]:
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in output.splitlines())


def test_the_digest_is_the_same_in_every_run_and_on_any_number_of_threads(
    runner: CliRunner, tiny_artifact: Path
) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    first = printed(runner, tiny_artifact, "--threads", "1")
    assert first == printed(runner, tiny_artifact, "--threads", "2")
    assert first["class"] == manifest.target.numeric_class and first["target"] == manifest.target.name
    assert first["weights"] == f"sha256 {manifest.files['weights.safetensors'].sha256}"
    assert first["logits"] == f"512 tokens x {manifest.model.vocab_size:,}"
    assert re.fullmatch("sha256 [0-9a-f]{64}", first["digest"])


def test_fewer_tokens_have_another_digest_and_no_more_are_computed_than_the_context_has(
    runner: CliRunner, tiny_artifact: Path
) -> None:
    found = json.loads(runner.invoke(cli, ["verify-bits", str(tiny_artifact), "--tokens", "70", "--json"]).output)
    artifact = Artifact.open(tiny_artifact)
    assert found["num_tokens"] == 70
    assert found["sha256"] == logits_digest(artifact, num_tokens=70).sha256 != logits_digest(artifact).sha256
    assert logits_digest(artifact, num_tokens=10**6).num_tokens == artifact.manifest.context_length
    with pytest.raises(InvalidParameter, match="num_tokens is 0"):
        logits_digest(artifact, num_tokens=0)


def test_smollm2_has_the_digest_that_the_page_publishes(runner: CliRunner, smollm2_codes_artifact: Path) -> None:
    """Whatever CPU runs this test, if it has fused multiply-add."""
    page = (REPOSITORY / "docs" / "exactness.md").read_text(encoding="utf-8")
    command, *_, shown = re.findall(r"```(?:sh)?\n(.*?)\n```", page.split("\n## ")[0], re.DOTALL)
    assert command == "radixlm verify-bits smollm2 --kv-dtype k12v8"
    published, found = rows(shown), printed(runner, smollm2_codes_artifact)
    if found["class"] != published["class"]:
        pytest.skip(f"this CPU's targets are of the class {found['class']}")
    del published["target"], found["target"]
    assert found == published, "a kernel or weights changed. If they had to, publish the new digest."


@pytest.mark.parametrize("vocab_size", [1, 320, 152_064])
def test_token_ids_visit_the_whole_vocabulary_evenly(vocab_size: int) -> None:
    ids = [usual_id(place, vocab_size) for place in range(2048)]
    assert all(0 <= each < vocab_size for each in ids)
    assert len(set(ids)) >= min(vocab_size, 2048) * 0.9
