"""Recorded requests that name a LoRA adapter: `warm` and `explain-cache` compute them with it, under its own key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli
from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.prefix.prefix_loader import PrefixLoader

from ..conftest import CompileOnce
from ..goldens.tiny_adapters import TinyAdapter
from ..runtime.engine.test_loras import REPLY, always_load

PROMPT = "once there was a tree, and in the tree there was a bird"


@pytest.fixture(scope="module")
def artifact(compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyAdapter("llama").tiny
    source = tiny.write(tmp_path_factory.mktemp("sources") / "llama")
    return compile_once(source, "f32", quantize="q8", context_length=tiny.context_length, max_loras=4)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyAdapter("llama", 1).write_peft(tmp_path_factory.mktemp("adapters") / "sql")


def test_a_warmed_prompt_is_found_with_its_adapter_alone(
    runner: CliRunner, artifact: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixLoader, "plan", staticmethod(always_load))
    requests = tmp_path / "requests.jsonl"
    cached = {}
    for model in ("qwen3:sql", "sql", "qwen3:4b"):
        requests.write_text(json.dumps({"model": model, "prompt": PROMPT}))
        store = tmp_path / model
        arguments = [str(artifact), "--store", str(store), "--lora", f"sql={adapter}", "--max-num-seqs", "8"]
        done = runner.invoke(cli, ["warm", *arguments, str(requests)])
        assert done.exit_code == 0 and "0 found" in done.output, done.output
        for lora in ("sql", None):
            with Engine(artifact, store=store, max_num_seqs=8, loras={"sql": adapter}) as engine:
                options = RequestOptions(namespace=engine.namespaces.of(CacheScope()), lora=lora)
                cached[model, lora] = engine.generate(PROMPT, REPLY, options=options).usage.cached_tokens > 0
    assert cached == {
        **{("qwen3:sql", "sql"): True, ("qwen3:sql", None): False, ("sql", "sql"): True, ("sql", None): False},
        **{("qwen3:4b", "sql"): False, ("qwen3:4b", None): True},
    }


@pytest.mark.parametrize("generates", [False, True])
def test_the_cache_is_explained_by_adapter(
    runner: CliRunner, artifact: Path, adapter: Path, *, generates: bool
) -> None:
    models = ("small:sql", "small", "small:sql", "sql", "small:law", "law")
    turns = json.dumps([{"model": model, "prompt": PROMPT} for model in models])
    loras = [argument for name in ("sql", "law") for argument in ("--lora", f"{name}={adapter}")]
    arguments = [str(artifact), "--turns", "-", "--json", "--kv-cache-gb", "0.1", "--max-num-seqs", "8", *loras]
    done = runner.invoke(cli, ["explain-cache", *arguments, *([] if generates else ["--no-generate"])], input=turns)
    assert done.exit_code == 0, done.output
    explained = json.loads(done.output)
    assert [turn["num_cached_tokens"] > 0 for turn in explained] == [False, False, True, True, True, True]
    assert [turn["why_not_more"]["kind"] for turn in explained[:2]] == ["unseen", "namespace"], "not the adapter's"


@pytest.mark.parametrize("command", [["warm", "--store", "store"], ["explain-cache", "--turns"]])
def test_an_adapter_that_cannot_be_read_is_an_error(
    runner: CliRunner, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    body = {"prompt": PROMPT}
    Path("requests").write_text(json.dumps(body if command[0] == "warm" else [body]))
    done = runner.invoke(cli, [command[0], str(artifact), *command[1:], "requests", "--lora", "sql=nowhere"])
    assert done.exit_code == 2 and "nowhere" in done.output and done.output.count("\n") == 1, done.output
