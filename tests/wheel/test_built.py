"""What is in the wheels, the source archives and the bills of materials. `.ci/release.py` has compared two builds."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from .conftest import PYTHONS, ROOT, metadata

DISTRIBUTIONS = ("radixlm", "radixlm-serve")


def wheel_of(built: Path, name: str) -> Path:
    [found] = built.glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return found


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheels_share_no_file_and_have_every_module(built: Path) -> None:
    full, serve = (names_of(wheel_of(built, name)) for name in DISTRIBUTIONS)
    assert full & serve == set()
    folders = ("cli", "compile", "runtime", "tokenizer_fix")
    modules = {f"radixlm/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")}
    modules |= {f"radixlm/{path.name}" for path in (ROOT / "package").glob("*.py")}
    assert {name for name in full | serve if name.endswith(".py")} == modules
    assert {name for name in full if not name.startswith("radixlm/compile/")} == set()


def test_data_that_modules_read_is_there(built: Path) -> None:
    everything = names_of(wheel_of(built, "radixlm")) | names_of(wheel_of(built, "radixlm-serve"))
    data = {name.removeprefix("radixlm/") for name in everything if not name.endswith(".py")}
    static = {str(path.relative_to(ROOT)) for path in (ROOT / "runtime/server/static").rglob("*") if path.is_file()}
    typed = {"py.typed"} | {f"{folder}/py.typed" for folder in ("cli", "compile", "runtime", "tokenizer_fix")}
    others = {
        "compile/verified.json",
        *(f"compile/codegen/{path.name}" for path in (ROOT / "compile/codegen").glob("*.ll")),
    }
    assert data == static | typed | others | {"runtime/extras/approximate/calibration/text.txt"}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_metadata_tells_what_it_is(built: Path, name: str) -> None:
    about = metadata(wheel_of(built, name))
    assert (about["Name"], about["License-Expression"], about["Requires-Python"]) == (name, "Apache-2.0", ">=3.11")
    assert {f"Programming Language :: Python :: {version}" for version in PYTHONS} <= {*about.get_all("Classifier")}
    assert about["Keywords"] and about["Summary"] and about.get_all("Project-URL")
    assert about.get_all("License-File") == ["LICENSE"]


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_links_of_the_description_work_outside_the_repository(built: Path, name: str) -> None:
    about = metadata(wheel_of(built, name))
    [repository] = [url.partition(", ")[2] for url in about.get_all("Project-URL") if url.startswith("Repository")]
    links = re.findall(r"\]\(([^)]+)\)", about.get_payload(decode=True).decode())
    ours = f"{repository}/blob/v{about['Version']}/"
    paths = [link.removeprefix(ours).partition("#")[0] for link in links if link.startswith(ours)]
    assert all("://" in link for link in links)
    assert "docs/serving.md" in paths and [path for path in paths if not (ROOT / path).exists()] == []


def test_only_the_distribution_with_the_compiler_needs_tvm(built: Path) -> None:
    full, serve = (metadata(wheel_of(built, name)).get_all("Requires-Dist") for name in DISTRIBUTIONS)
    version = metadata(wheel_of(built, "radixlm"))["Version"]
    assert f"radixlm-serve=={version}" in full
    of_tvm = [one for one in (*full, *serve) if one.startswith("apache-tvm==")]
    assert of_tvm == [one for one in full if one.startswith("apache-tvm==")] != []


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_source_archive_has_what_its_wheel_is_built_of(built: Path, name: str) -> None:
    [archive] = built.glob(f"{name.replace('-', '_')}-[0-9]*.tar.gz")
    with tarfile.open(archive) as opened:
        members = {"/".join(member.name.split("/")[1:]): member for member in opened.getmembers()}
        assert {(member.uid, member.uname) for member in members.values()} == {(0, "")}
    packed = names_of(wheel_of(built, name))
    places = ("", "package/")  # of modules, and of those that are the package itself
    assert [one for one in packed if not any(place + one.removeprefix("radixlm/") in members for place in places)] == []


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_bill_of_materials_lists_what_is_installed(built: Path, name: str) -> None:
    [path] = built.glob(f"{name}-[0-9]*.cdx.json")
    bill = json.loads(path.read_text(encoding="utf-8"))
    components = {component["name"]: component["version"] for component in bill["components"]}
    version = metadata(wheel_of(built, name))["Version"]
    assert bill["bomFormat"] == "CycloneDX" and components[name] == version
    assert ("apache-tvm" in components) is (name == "radixlm") and "numpy" in components
    assert "timestamp" not in bill["metadata"]  # the same bytes in every build
