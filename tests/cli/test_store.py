"""What `radixlm store` says of a directory, and what it carries to another one."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from numpy.typing import NDArray
from radixlm.cli.main import cli
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity, adapted_namespace
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.catalogue import Catalogue
from radixlm.runtime.store.record import sealed
from radixlm.runtime.store.record_writer import RecordWriter
from tokenizers import Tokenizer

from ..runtime.server.real_server import open_fake_artifact

SYSTEM = "You are a helpful assistant who answers in one sentence and never guesses. "


@dataclass
class Stored:
    """A directory with a system prompt of several pages and two questions behind it."""

    directory: Path
    artifact: Path
    identity: StoreIdentity
    heads: list[PageKey]
    num_system: int  # pages

    def open(self, directory: Path) -> PageStore:
        return PageStore.open(directory, self.identity, max_bytes=1 << 30)

    def payload(self) -> NDArray[np.uint8]:
        rows = [np.random.default_rng(list(head.token_ids)).bytes(self.identity.page_bytes) for head in self.heads]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stored:
    artifact = open_fake_artifact()
    monkeypatch.setattr(Artifact, "open", lambda path: artifact)
    identity, tokenizer = StoreIdentity.of(artifact.manifest), Tokenizer.from_str(artifact.tokenizer_json)
    ids = tokenizer.encode(SYSTEM * 5, add_special_tokens=False).ids
    num_system = len(ids) // 16
    with PageStore.open(tmp_path / "store", identity, max_bytes=1 << 30) as store:
        namespace = CacheNamespaces(ModelIdentity.of(artifact.manifest), store.secret).of(CacheScope())
        heads = [head_of(identity, namespace, None, ids[:16])]
        for first in range(16, num_system * 16, 16):
            heads.append(head_of(identity, namespace, heads[-1], ids[first : first + 16]))
        for question in (
            "What is the capital of France and why is it? " * 5,
            "How far away is the Moon, on average? " * 5,
        ):
            ids = tokenizer.encode(question, add_special_tokens=False).ids
            heads.append(head_of(identity, namespace, heads[num_system - 1], ids[:16]))
        made = Stored(tmp_path / "store", Path("fake.radixlm"), identity, heads, num_system)
        assert len(store.put(heads, made.payload()).stored) == len(heads)
    return made


def head_of(identity: StoreIdentity, namespace: bytes, parent: PageKey | None, ids: list[int]) -> PageKey:
    return PageKey.of(identity, namespace, NO_PARENT if parent is None else parent.key, ids, bytes(16))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["store", *map(str, arguments)])


def test_ls_shows_where_prompts_part_and_their_text(stored: Stored) -> None:
    lines = run("ls", stored.directory, "--artifact", stored.artifact).output.splitlines()
    assert lines[0].startswith("model ")
    assert f"{len(stored.heads)} pages" in lines[0]
    assert lines[1].startswith("  namespace ")
    system, *questions = lines[2:]
    assert stored.heads[stored.num_system - 1].key.hex()[:12] in system
    assert "You are a helpful" in system
    assert len(questions) == 2
    assert "capital of" in "".join(questions)
    assert "You are" not in run("ls", stored.directory).output

    [model] = json.loads(run("ls", stored.directory, "--json").output)
    assert [run["num_tokens"] for run in model["runs"]] == [stored.num_system * 16, 16, 16]
    assert [run["num_tokens_from_start"] for run in model["runs"]] == [
        16 * n for n in (stored.num_system, *[stored.num_system + 1] * 2)
    ]


def test_ls_stats_verify_and_export_work_beside_a_server_and_gc_and_import_do_not(
    stored: Stored, tmp_path: Path
) -> None:
    key = stored.heads[-1].key.hex()
    with stored.open(stored.directory) as store:
        store.discard(b"nobody")
        for arguments in (["ls"], ["stats"], ["verify"]):
            done = run(arguments[0], stored.directory)
            assert done.exit_code == 0, done.output
        assert run("export", stored.directory, key, "-o", tmp_path / "bundle").exit_code == 0
        for arguments in (["gc"], ["import", tmp_path / "bundle", "--artifact", stored.artifact]):
            done = run(arguments[0], stored.directory, *arguments[1:])
            assert done.exit_code == 2
            assert "is open in process" in done.output


def test_stats_say_how_many_pages_there_are(stored: Stored) -> None:
    [model] = json.loads(run("stats", stored.directory, "--json").output)["models"]
    assert model["num_pages"] == len(stored.heads)
    assert model["model_digest"] == stored.identity.model_digest
    assert f"{len(stored.heads)} pages" in run("stats", stored.directory).output


def test_verify_says_what_is_wrong_and_fails(stored: Stored) -> None:
    assert f"{len(stored.heads)} pages are valid" in run("verify", stored.directory).output
    [path] = stored.directory.glob("segment-*")
    data = bytearray(path.read_bytes())
    data[-4000] ^= 1  # in the last page's keys
    path.write_bytes(data)
    done = run("verify", stored.directory)
    assert done.exit_code == 2
    assert f"1 of {len(stored.heads)} pages are damaged (1 payload)" in done.output


def test_gc_gives_room_back(stored: Stored) -> None:
    with stored.open(stored.directory) as store:
        store.drop([stored.heads[-1].key])
    assert "1 segments removed" in run("gc", stored.directory).output
    assert "0 segments removed" in run("gc", stored.directory).output
    assert f"{len(stored.heads) - 1} pages are valid" in run("verify", stored.directory).output


def test_gc_says_that_it_could_not_give_room_back(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "on purpose")

    monkeypatch.setattr(RecordWriter, "collect", fail)
    done = run("gc", stored.directory)
    assert done.exit_code == 2 and "could not be freed" in done.output


def test_an_exported_prefix_is_found_by_requests_of_another_machine(stored: Stored, tmp_path: Path) -> None:
    bundle, there = tmp_path / "bundle", tmp_path / "there"
    key = stored.heads[stored.num_system - 1].key.hex()[:12]
    assert f"{stored.num_system} pages" in run("export", stored.directory, key, "-o", bundle).output
    done = run("import", there, bundle, "--artifact", stored.artifact, "--cache-salt", "s")
    assert f"{stored.num_system} of {stored.num_system} pages are stored" in done.output
    manifest = Artifact.open(stored.artifact).manifest
    with stored.open(there) as store:
        heads = list(store.page_keys())
        namespaces = CacheNamespaces(ModelIdentity.of(manifest), store.secret)
        assert {head.namespace for head in heads} == {namespaces.of(CacheScope(cache_salt="s"))}
        assert [head.token_ids for head in heads] == [head.token_ids for head in stored.heads[: stored.num_system]]
        out = np.empty((len(heads), stored.identity.page_bytes), np.uint8)
        assert store.read(heads, out) == len(heads)
        assert (out == stored.payload()[: stored.num_system]).all()


def test_pages_of_adapters_are_listed_apart_and_not_exported(stored: Stored, tmp_path: Path) -> None:
    base = stored.heads[0].namespace
    heads = [head_of(stored.identity, adapted_namespace(base, name), None, [*range(16)]) for name in ("a", "b")]
    with stored.open(stored.directory) as store:
        store.put(heads, stored.payload()[:2])
    for command in ("ls", "stats"):
        lines = run(command, stored.directory).output.splitlines()
        adapters = {line.split()[2] for line in lines if line.startswith("  LoRA adapter ")}
        assert len(adapters) == 2 and any(line.startswith(f"  namespace {base.hex()[:12]}") for line in lines)
    done = run("export", stored.directory, heads[0].key.hex(), "-o", tmp_path / "bundle")
    assert done.exit_code == 2 and "computed with a LoRA adapter are not exported" in done.output


def test_an_import_takes_nothing_out_of_a_store_unless_it_is_told_to(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, there = tmp_path / "bundle", tmp_path / "there"
    assert run("export", stored.directory, stored.heads[-1].key.hex(), "-o", bundle).exit_code == 0
    with stored.open(there) as store:  # of a server with more room than any default, if a gigabyte were 100 kB
        first = [head_of(stored.identity, b"theirs", None, [number] * 16) for number in range(160)]
        for heads in (first[at : at + 4] for at in range(0, 160, 4)):
            store.put(heads, np.zeros((len(heads), stored.identity.page_bytes), np.uint8))
        assert store.stats().num_bytes > 1_200_000
    open_store = PageStore.open

    def open_small(directory: Path, identity: StoreIdentity, *, max_bytes: int) -> PageStore:
        return open_store(directory, identity, max_bytes=max_bytes // 10_000)

    monkeypatch.setattr(PageStore, "open", open_small)
    command = ["import", there, bundle, "--artifact", stored.artifact]
    num_pages = stored.num_system + 1
    assert run(*command).output == f"{num_pages} of {num_pages} pages are stored\n"
    assert {head.key for head in first} < keys_in(there)
    told = run(*command, "--cache-salt", "other", "--store-gb", 8).output
    assert f"{num_pages} of {num_pages} pages are stored" in told and "were evicted" in told
    assert not {head.key for head in first} <= keys_in(there)


def test_an_import_that_the_disk_has_no_room_for_says_so_and_takes_nothing_out(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, there = tmp_path / "bundle", tmp_path / "there"
    assert run("export", stored.directory, stored.heads[-1].key.hex(), "-o", bundle).exit_code == 0
    with stored.open(there) as store:
        first = [head_of(stored.identity, b"theirs", None, [number] * 16) for number in range(8)]
        store.put(first, np.zeros((8, stored.identity.page_bytes), np.uint8))
        monkeypatch.setattr("radixlm.cli.store._ALL_OF_THE_DISK", store.stats().num_bytes)
    said = run("import", there, bundle, "--artifact", stored.artifact).output
    assert said == f"0 of {stored.num_system + 1} pages are stored; the disk has no room for more\n"
    assert keys_in(there) == {head.key for head in first}


def keys_in(directory: Path) -> set[bytes]:
    return {page.key for model in Catalogue.read(directory).models for page in model.pages}


def test_a_key_of_no_page_or_of_several_is_refused(stored: Stored, tmp_path: Path) -> None:
    for key in ("", "x"):
        done = run("export", stored.directory, key, "-o", tmp_path / "bundle")
        assert done.exit_code == 2
        assert "it must be one" in done.output


def test_a_directory_that_is_no_store_is_refused(tmp_path: Path) -> None:
    for name in ("ls", "stats", "verify"):
        done = run(name, tmp_path)
        assert done.exit_code == 2
        assert "is no store" in done.output
    assert "no pages" in run("gc", tmp_path).output


def test_a_store_of_another_format_is_refused_in_one_line_and_left_alone(stored: Stored) -> None:
    [path] = stored.directory.glob("segment-*")
    data = bytearray(path.read_bytes())
    data[8] = 1
    data[:4096] = sealed(bytes(data[: 4096 - 16]), 4096)
    path.write_bytes(data)
    for arguments in (["ls"], ["stats"], ["verify"], ["gc"], ["export", "00", "-o", "bundle"]):
        done = run(arguments[0], stored.directory, *arguments[1:])
        assert done.exit_code == 2
        assert "has version 1, this radixlm reads 2; give --store another directory" in done.output
    assert path.read_bytes() == data
