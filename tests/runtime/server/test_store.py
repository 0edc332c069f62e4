"""What clients, metrics and `/health` are told of a server that keeps prefixes on disk."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from radixlm.runtime.store import PageStore, StoreIdentity

from ..eager_loads import load_always
from ..store.faulty_files import FailAt, FaultyFiles
from .real_server import RealServer, open_fake_artifact, real_server, wait_until
from .test_metrics import read

HISTORY = [{"role": "user", "content": "once there was a tree, and in the tree there was a bird, and once it sang"}]


@pytest.fixture(autouse=True)
def load_whatever_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is worth it says `test_prefix_plan.py`."""
    load_always(monkeypatch)


def details(server: RealServer) -> dict[str, object]:
    usage = server.chat(messages=HISTORY, max_tokens=4, temperature=0).json()["usage"]
    found: dict[str, object] = usage["prompt_tokens_details"]
    return found


def test_after_a_restart_usage_and_metrics_say_what_came_from_disk(tmp_path: Path) -> None:
    with real_server(store=tmp_path) as server:
        first = details(server)
        assert first["cached_tokens_by_tier"] == {}
        again = details(server)
        assert again["cached_tokens_by_tier"] == {"memory": again["cached_tokens"]}
    with real_server(store=tmp_path) as server:
        warm = details(server)
        tiers = warm["cached_tokens_by_tier"]
        assert isinstance(tiers, dict) and tiers["disk"] > 0 and sum(tiers.values()) == warm["cached_tokens"]
        found = read(server)
        assert found["prefix_hit_tokens_total", "exact", "disk"] == tiers["disk"]
        assert found["store_loads_total",] == 1 and found["store_pages_loaded_total",] == tiers["disk"] / 16
        assert found["store_up",] == 1 and found["store_bytes_read_total",] > 0
        assert server.get("/health").json()["tier"]["num_loads"] == 1
        cleared = server.client.delete(f"{server.url}/v1/cache").json()
        assert cleared["num_discarded_pages"] > 0
    with real_server(store=tmp_path) as server:
        assert details(server)["cached_tokens"] == 0


def test_without_a_store_nothing_is_said_of_one() -> None:
    with real_server() as server:
        found = read(server)
        assert not any(key[0].startswith("store_") or "disk" in key for key in found)
        assert server.get("/health").json()["tier"] is None


def test_a_store_that_failed_is_said_to_be_off_and_the_server_goes_on(tmp_path: Path) -> None:
    files, identity = FaultyFiles(), StoreIdentity.of(open_fake_artifact().manifest)
    store = PageStore.open(tmp_path, identity, max_bytes=64 << 20, files=files)
    with real_server(store=store) as server:
        full = OSError(errno.ENOSPC, "No space left on device")
        files.before = FailAt(0, full, operations=["pwritev"])
        server.chat(messages=LONG, max_tokens=1)
        wait_until(lambda: server.get("/health").json()["status"] == "degraded")
        health = server.get("/health")
        assert health.status_code == 200 and health.json()["status"] == "degraded"
        assert "No space left" in health.json()["reason"] and "store is off" in health.json()["reason"]
        tiers = details(server)["cached_tokens_by_tier"]
        assert isinstance(tiers, dict) and "disk" not in tiers  # the template's first tokens are in memory
        assert read(server)["store_up",] == 0
        cleared = server.client.delete(f"{server.url}/v1/cache")  # what is on disk may still be there
        assert cleared.status_code == 503 and cleared.json()["error"]["code"] == "store_off"


LONG = [{"role": "system", "content": "once there was a tree, and in the tree there was a bird " * 4}]
