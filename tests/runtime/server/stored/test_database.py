"""Files of other versions, and damaged ones: nothing that a client stored is lost by opening them."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.errors import StoreOff
from radixlm.runtime.server.stored import database as database_module
from radixlm.runtime.server.stored.database import FILE, Database

T = TypeVar("T")


def run(database: Database, work: Callable[[sqlite3.Connection], T]) -> T:
    return asyncio.run(database.run(work))


def owner_of(database: Database, sql: sqlite3.Connection) -> bytes:
    return database.owner(CacheScope("sk-1"))


def killed(folder: Path, script: str) -> dict[str, bytes]:
    """Make a database whose last transaction, `script`, is in its log alone, as a killed server leaves it."""
    living = folder / "living"
    living.mkdir()
    database = Database(living)
    run(database, lambda sql: None)
    database._closing()
    with closing(sqlite3.connect(living / FILE, isolation_level=None)) as sql:
        sql.executescript(f"PRAGMA wal_autocheckpoint = 0; BEGIN; {script} COMMIT;")
        for name in (FILE, f"{FILE}-wal"):
            shutil.copy(living / name, folder / name)
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("responses.*") if not path.name.endswith("-shm")}


def test_a_file_of_a_newer_version_is_refused_and_stays_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = len(database_module._MIGRATIONS) + 1
    before = killed(tmp_path, f"PRAGMA user_version = {newer};")
    database = Database(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreOff, match=f"{FILE} has version {newer}, and this radixlm reads .* update radixlm"):
            run(database, lambda sql: None)
    assert files(tmp_path) == before
    assert f"has version {newer}" in caplog.text


def test_a_file_of_an_older_version_is_migrated_with_all_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path)
    owner = run(database, partial(owner_of, database))
    database._closing()
    more = (*database_module._MIGRATIONS, "CREATE TABLE added (value); INSERT INTO added SELECT value FROM secret;")
    monkeypatch.setattr(database_module, "_MIGRATIONS", more)
    for _ in range(2):  # the second time there is nothing to do
        later = Database(tmp_path)
        assert run(later, lambda sql: sql.execute("SELECT count(*) FROM added").fetchone()) == (1,)
        assert run(later, partial(owner_of, later)) == owner
        assert run(later, lambda sql: sql.execute("PRAGMA user_version").fetchone()) == (len(more),)
        later._closing()


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(tmp_path)
    owner = run(database, partial(owner_of, database))
    database._closing()
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "_MIGRATIONS", (*database_module._MIGRATIONS, "CREATE TABLE a (b); NONSENSE;"))
        with pytest.raises(StoreOff):
            run(Database(tmp_path), lambda sql: None)
    later = Database(tmp_path)
    assert run(later, partial(owner_of, later)) == owner
    later._closing()


def test_a_damaged_file_is_set_aside_with_its_log_and_the_new_one_does_not_read_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = killed(tmp_path, "CREATE TABLE added (value); DELETE FROM secret;")
    (tmp_path / "responses.broken-wal").write_bytes(b"of an earlier one")
    database = Database(tmp_path)
    with caplog.at_level(logging.ERROR):
        assert run(database, lambda sql: sql.execute("SELECT count(*) FROM secret").fetchone()) == (1,)
    assert "it has no secret" in caplog.text and "renamed to responses.broken" in caplog.text
    database._closing()
    with closing(sqlite3.connect(tmp_path / "responses.broken")) as aside:
        assert aside.execute("SELECT count(*) FROM added").fetchone() == (0,), (
            "what was in the log alone is still there"
        )
    assert before.keys() == {FILE, f"{FILE}-wal"}
