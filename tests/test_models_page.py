"""What is told of families, formats and targets is what the registry has and the goldens compared."""

from __future__ import annotations

import json

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
    models, readme = ((made.ROOT / name).read_text(encoding="utf-8") for name in ("docs/models.md", "README.md"))
    assert made.TABLE.search(models) and made.TARGET_TABLE.search(models) and made.SENTENCE.search(readme)
    assert all(family.title in models for family in FAMILIES.values()), AGAIN
    assert all(f"\n| `{name}` |" in models for name in TARGETS), AGAIN


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
