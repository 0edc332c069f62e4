"""A server is killed in the middle of a reply; the next one goes on from its disk, and the bits are the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 120.0  # only a hang takes that long
STORY = "The lighthouse keeper wrote down the weather of every day, and what ships had passed, and who was lost. "
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": STORY * 24 + "What did the keeper write down?"}],
    "temperature": 0,
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 5,
    "ignore_eos": True,
}


@contextmanager
def serving(artifact: Path, store: Path, log: Path) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-c", "from radixlm.cli.main import main; main()", "serve", str(artifact)]
    options = ["--port", "0", "--store", str(store), "--store-gb", "1", "--kv-cache-gb", "0.3"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, *options], stderr=file)
    try:
        deadline = time.monotonic() + WAIT_S
        while (found := re.search(r"serving .* at (http://\S+)/v1", log.read_text())) is None:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        with httpx.Client(base_url=found[1], timeout=WAIT_S) as client:
            yield client, process
    finally:
        process.kill()
        process.wait()


def test_what_a_killed_server_had_computed_is_loaded_by_the_next_one(smollm2_artifact: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with (
        serving(smollm2_artifact, store, tmp_path / "first.log") as (client, process),
        client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "max_tokens": 500}) as reply,
    ):
        lines = reply.iter_lines()  # while nobody holds them the reply is given up, and nothing more is computed
        assert next(lines).startswith("data: {")
        deadline = time.monotonic() + WAIT_S
        while tier(client)["num_pages"] < 30:  # of the prompt, which has 33 full ones or more
            assert time.monotonic() < deadline, "nothing is saved while the reply goes on"
            time.sleep(0.02)
        process.kill()
    with serving(smollm2_artifact, store, tmp_path / "second.log") as (client, _):
        found = tier(client)["num_pages"]
        warm = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 16}).json()
        cold = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 16, "cache_salt": "cold"}).json()
        books = tier(client)
    details = warm["usage"]["prompt_tokens_details"]
    assert found >= 30, "what was on disk when the server was killed is found again"
    assert books["num_loads_broken"] == 0 and not any(books["misses_by_kind"].values()), json.dumps(books)
    # on a disk as slow as this model is quick, some of it is computed instead, and then the books say so
    whys = ("refused", "late", "cut", "from_end")
    computed_instead = sum(books[f"num_loads_{why}"] for why in whys)
    assert details["cached_tokens_by_tier"].get("disk", 0) >= 30 * 16 or computed_instead, json.dumps(details | books)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["choices"] == cold["choices"], "text, ids and the floats of all logprobs"


def tier(client: httpx.Client) -> dict[str, Any]:
    return dict(client.get("/health").json()["tier"])
