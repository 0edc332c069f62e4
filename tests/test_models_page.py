"""What is told of families, formats and targets is what the registry has and the goldens compared."""

from __future__ import annotations

import json
import re

from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.compile import evidence
from radixlm.compile.codegen.targets import TARGETS
from radixlm.compile.families.registry import FAMILIES
from radixlm.compile.sources.quantized import registry as quantized

from .goldens import evidence as made

AGAIN = (
    "a family, golden, kernel or target came or went: run python -m tests.goldens.evidence, and commit what it writes"
)


def test_what_was_verified_is_what_the_goldens_say() -> None:
    assert evidence.VERIFIED.read_text(encoding="utf-8") == made.verified(), AGAIN


def test_the_pages_say_what_the_registry_has() -> None:
    for path, text in made.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: {AGAIN}"


def test_the_pages_have_a_place_for_it() -> None:
    names = ("docs/models.md", "docs/platforms.md", "README.md")
    models, platforms, readme = ((made.ROOT / name).read_text(encoding="utf-8") for name in names)
    assert made.TABLE.search(models) and made.TARGET_TABLE.search(platforms) and made.NUMBER.search(readme)
    assert made.FORMAT_TABLE.search(models)
    assert all(family.title in models for family in FAMILIES.values()), AGAIN
    assert all(f"\n| `{name}` |" in platforms for name in TARGETS), AGAIN
    assert all(f"\n| {each.title} | {each.reads} | {each.kept} |" in models for each in evidence.FORMATS), AGAIN


def test_a_golden_without_a_second_witness_is_told_beside_the_distance_of_the_others() -> None:
    """The largest distance stood there as if it were of all."""
    models = (made.ROOT / "docs/models.md").read_text(encoding="utf-8")
    told = CliRunner().invoke(cli, ["models"]).output
    compared = [each for each in evidence.families() if each.llama_cpp is not None]
    alone = [golden.name for each in compared for golden in each.goldens if golden.llama_cpp is None]
    assert "exaone4" in alone
    for name in alone:
        assert re.search(rf"\| [0-9e-]+; not [^|]*\b{name}\b[^|]*\|", models), AGAIN
        assert re.search(rf"not compared: [^)]*\b{name}\b[^)]*\)", told)


def test_a_real_model_is_compared_by_a_test() -> None:
    assert all((made.ROOT / test).is_file() for _, test in made.REAL.values())


def test_every_quantized_format_is_listed() -> None:
    listed = {each.title.lower() for each in evidence.FORMATS}
    named = {name.split(" (")[0].strip().lower() for name in quantized.SUPPORTED.replace(" and ", ", ").split(", ")}
    assert {name for name in named if ")" not in name} <= listed


def test_models_lists_families_and_formats() -> None:
    runner = CliRunner()
    told = json.loads(runner.invoke(cli, ["models", "--json"]).output)
    assert [each["title"] for each in told["families"]] == [family.title for family in FAMILIES.values()]
    assert told["families"][0]["goldens"][0]["name"] == "llama"
    text = runner.invoke(cli, ["models"]).output
    assert all(name in text for each in told["families"] for name in (each["title"], *each["classes"], *each["gguf"]))
    assert all(each["title"] in text for each in told["formats"])
