"""`radixlm warm`: what was computed before anybody asked is found by those whose key, salt and prompt it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from radixlm.cli.main import cli
from radixlm.cli.warm.asking import read_bodies
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.engine import opening
from radixlm.runtime.store import PageStore, StoreIdentity
from radixlm.runtime.store.catalogue import Catalogue

from ..runtime.eager_loads import load_always
from ..runtime.server.real_server import SlowModel, open_fake_artifact, real_server

SYSTEM = "once there was a tree, and in the tree there was a bird, and once it sang"
PROMPT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "sing"}]
LATER = [PROMPT[0], {"role": "user", "content": "who was there?"}]
BODIES = {
    "/v1/chat/completions": {"messages": PROMPT, "n": 2, "max_completion_tokens": 30, "min_tokens": 9},
    "/v1/messages": {"system": SYSTEM, "messages": [PROMPT[1]], "max_tokens": 100, "model": "claude-of-another-server"},
    "/v1/responses": {"instructions": SYSTEM, "input": "sing", "max_output_tokens": 64, "stream": False},
}


@pytest.fixture(autouse=True)
def fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose prefixes on disk are always worth loading."""
    artifact = open_fake_artifact()
    monkeypatch.setattr(Artifact, "open", lambda path: artifact)
    open_given = opening._open_runner

    def open_runner(artifact: Any, num_pages: int, options: Any, **_: object) -> Any:
        return SlowModel(num_pages) if options.open_runner is None else open_given(artifact, num_pages, options)

    monkeypatch.setattr(opening, "_open_runner", open_runner)
    load_always(monkeypatch)


def warm(store: Path, *sources: object, **options: str) -> Result:
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    arguments = ["warm", "fake.radixlm", "--store", str(store), "--max-num-seqs", "8", *named, *map(str, sources)]
    return CliRunner().invoke(cli, arguments)


def lines(path: Path, *bodies: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, bodies)) + "\n\n")
    return path


def computed(store: Path, key: str | None = None, **fields: Any) -> int:
    """Tokens of a new conversation's first prompt that a server computes which has this store."""
    app = {"api_keys": ["sk-ours", "sk-theirs"]} if key else {}
    with real_server(store=store, app=app) as server:
        server.client.headers["authorization"] = f"Bearer {key}"
        reply = server.chat(messages=LATER, max_tokens=1, **fields).json()
    usage = reply["usage"]
    num_computed: int = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    return num_computed


@pytest.mark.parametrize("path", BODIES)
def test_a_first_request_computes_only_what_is_new(path: str, tmp_path: Path) -> None:
    cold = computed(tmp_path / "cold")
    done = warm(tmp_path / "store", lines(tmp_path / "requests.jsonl", BODIES[path]))
    assert done.exit_code == 0, done.output
    assert "1 prompts of " in done.output and "0 found" in done.output
    num_pages = sum(len(model.pages) for model in Catalogue.read(tmp_path / "store").models)
    assert num_pages > 1 and f"{num_pages * 16} more than before" in done.output
    left = cold - computed(tmp_path / "store") - (num_pages - 1) * 16  # the last page may have some of what differs
    assert left in (0, 16) and num_pages * 16 > cold / 2


def test_the_second_time_all_is_found(tmp_path: Path) -> None:
    requests = lines(tmp_path / "requests.jsonl", *BODIES.values())
    assert "3 prompts" in warm(tmp_path / "store", requests).output
    assert " 0 more than before" in warm(tmp_path / "store", requests).output


def test_only_those_with_the_key_and_the_salt_find_it(tmp_path: Path) -> None:
    cold = computed(tmp_path / "cold", "sk-ours")
    requests = lines(tmp_path / "requests.jsonl", BODIES["/v1/chat/completions"])
    (tmp_path / "keys").write_text("sk-ours\n")
    done = warm(tmp_path / "store", requests, api_key_file=str(tmp_path / "keys"), cache_salt="s")
    assert done.exit_code == 0, done.output
    assert computed(tmp_path / "store", "sk-ours", cache_salt="s") < cold / 2
    for key, salt in (("sk-ours", None), ("sk-theirs", "s"), ("sk-ours", "t")):
        assert computed(tmp_path / "store", key, cache_salt=salt) == cold
    assert computed(tmp_path / "store", cache_salt="s") == cold, "without a key"


def test_the_key_of_a_conversation_may_be_left_out_for_a_server_that_ignores_it(tmp_path: Path) -> None:
    """What Codex had sent was kept for that conversation alone."""
    bodies = lines(tmp_path / "requests.jsonl", {**BODIES["/v1/responses"], "prompt_cache_key": "a thread"})
    store = tmp_path / "store"
    arguments = ["warm", "fake.radixlm", "--store", str(store), "--max-num-seqs", "8", str(bodies)]
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    cold = computed(store)
    done = CliRunner().invoke(cli, [*arguments, "--ignore-prompt-cache-key"])
    assert done.exit_code == 0, done.output
    assert computed(store) < cold // 2
    both = CliRunner().invoke(cli, [*arguments, "--ignore-prompt-cache-key", "--prompt-cache-key", "a thread"])
    assert both.exit_code == 2 and "choose one" in both.output


def test_a_bundle_is_taken_in_for_each_key(tmp_path: Path) -> None:
    cold = computed(tmp_path / "cold", "sk-ours")
    warm(tmp_path / "from", lines(tmp_path / "requests.jsonl", BODIES["/v1/chat/completions"]))
    [model] = Catalogue.read(tmp_path / "from").models
    last = model.pages[-1].key.hex()
    exported = CliRunner().invoke(
        cli, ["store", "export", str(tmp_path / "from"), last, "-o", str(tmp_path / "a.pages")]
    )
    assert exported.exit_code == 0, exported.output
    (tmp_path / "keys").write_text("sk-ours\nsk-theirs\n")
    done = warm(tmp_path / "store", tmp_path / "a.pages", api_key_file=str(tmp_path / "keys"))
    assert done.output.count(f"{len(model.pages)} of {len(model.pages)} pages are saved") == 2
    for key in ("sk-ours", "sk-theirs"):
        assert computed(tmp_path / "store", key) < cold / 2


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    requests = lines(tmp_path / "requests.jsonl", *BODIES.values())
    with PageStore.open(tmp_path / "store", StoreIdentity.of(open_fake_artifact().manifest), max_bytes=1 << 30):
        done = warm(tmp_path / "store", requests)
    assert done.exit_code == 2 and "is open in process" in done.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"messages": [}', "line 1 of {file} is not a JSON object"),
        ("[]", "line 1 of {file} is not a JSON object"),
        ('{"prompts": []}', "line 1 of {file} has neither messages, input nor prompt"),
        ('{"path": "/v1/embeddings", "input": ""}', "line 1 of {file} has the path '/v1/embeddings'"),
        ('{"path": 7, "input": ""}', "line 1 of {file} has the path 7"),
        ('{"messages": []}', "line 1 of {file}: "),
        ('{"prompt": "once there was", "cache_sat": "a"}', "line 1 of {file}: "),
        ('{"prompt": "' + "once " * 500 + '"}', "line 1 of {file}: "),
    ],
)
def test_a_line_that_cannot_be_asked_is_named(line: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text(line)
    done = warm(tmp_path / "store", file)
    assert done.exit_code == 2 and says.format(file=file) in done.output


def test_a_body_is_known_by_its_fields_or_by_its_path(tmp_path: Path) -> None:
    chat, messages = "/v1/chat/completions", "/v1/messages"
    user = {"role": "user", "content": "Hi"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}
    bodies: dict[str, dict[str, Any]] = {
        "plain": {"messages": [user]},
        "functions": {"messages": [user], "tools": [{"type": "function", "function": {"name": "f"}}]},
        "schema": {"messages": [user], "tools": [{"name": "f", "input_schema": {}}]},
        "blocks": {"messages": [user, called]},
        "named": {"path": messages, "messages": [user]},
        "beside": {"path": messages, "body": {"messages": [user]}},
    }
    read = read_bodies(lines(tmp_path / "requests.jsonl", *bodies.values()))
    assert [body.path for body in read] == [chat, chat, messages, messages, messages, messages]
