"""A chat model and an embedding model behind one address, for Ollama's, OpenAI's and LangChain's clients."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import ollama
import openai
import pytest
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import OpenAIEmbeddings

from ..serve_process import ServeProcess
from ..stand_in_hub import StandInHub

CHAT, VECTORS = "smollm2", "tiny-vectors"
REPOSITORY = Path(__file__).resolve().parents[2]
WRITE = """
import sys
from pathlib import Path
from tests.goldens.embeddings import tiny_embedding
tiny_embedding("llama").write(Path(sys.argv[1]), {"pooling_mode_mean_tokens": True})
"""
TEXTS = ["a plant with a trunk", "the river flows"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("several")
    hub = StandInHub(folder / "hub")
    models = folder / "models"
    for path in (models / VECTORS, hub.folder.parent):
        path.mkdir(parents=True)
    radixlm = Path(os.environ["RADIXLM"])
    subprocess.run([radixlm.with_name("python"), "-c", WRITE, models / VECTORS], check=True, cwd=REPOSITORY)
    shutil.copytree(models / VECTORS, hub.folder)
    (models / f"{CHAT}.radixlm").symlink_to(os.environ["RADIXLM_ARTIFACT"])
    command = [str(radixlm), "serve", "--models", str(models), "--port", "0", "--kv-cache-gb", "0.1"]
    pulled = ["--allow-pull", str(folder / "pulled.txt")]
    with hub.running():
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}
        with ServeProcess(*pulled, log=folder / "log", command=command, environment=environment) as server:
            yield server


@pytest.fixture
def client(server: ServeProcess) -> ollama.Client:
    return ollama.Client(server.url, timeout=120)


def wait_until_unloaded(client: ollama.Client) -> None:
    """Return once the chat model is not loaded any more."""
    deadline = time.monotonic() + 30
    while f"{CHAT}:latest" in {each.model for each in client.ps().models}:
        assert time.monotonic() < deadline, "it stays loaded"
        time.sleep(0.05)


def test_a_connection_is_verified_before_any_model_is_loaded(server: ServeProcess, client: ollama.Client) -> None:
    assert server.json("/api/version")["version"] and client.ps().models == []
    assert sorted(each.model for each in client.list().models) == [f"{CHAT}:latest", f"{VECTORS}:latest"]


def test_all_clients_get_the_same_vectors(server: ServeProcess, client: ollama.Client) -> None:
    embedded = client.embed(VECTORS, TEXTS, truncate=True, keep_alive="5m", options={"num_ctx": 128})
    vectors = [[*vector] for vector in embedded.embeddings]
    assert embedded.prompt_eval_count > 2 and vectors[0] != vectors[1]
    assert [*client.embeddings(VECTORS, TEXTS[0]).embedding] == vectors[0]
    assert [*client.embed(f"{VECTORS}:latest", TEXTS[1]).embeddings[0]] == vectors[1]
    assert OllamaEmbeddings(model=VECTORS, base_url=server.url).embed_documents(TEXTS) == vectors
    asked = {"model": VECTORS, "base_url": f"{server.url}/v1", "api_key": "none"}
    of_openai = OpenAIEmbeddings(**asked, check_embedding_ctx_length=False)
    assert of_openai.embed_query(TEXTS[0]) == pytest.approx(vectors[0], abs=1e-6)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as own:
        data = own.embeddings.create(model=VECTORS, input=TEXTS).data  # as base64, unless it is told otherwise
    assert [each.embedding for each in data] == [pytest.approx(vector, abs=1e-6) for vector in vectors]


def test_the_npm_package_gets_vectors(server: ServeProcess, client: ollama.Client) -> None:
    script = REPOSITORY / "tests" / "clients" / "npm" / "ollama.cjs"
    environment = os.environ | {"BASE_URL": server.url, "API_KEY": "", "MODEL": VECTORS, "QUESTION": TEXTS[0]}
    done = subprocess.run(["node", script, "embed"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"[[{client.embed(VECTORS, TEXTS[0]).embeddings[0][0]}" in done.stdout


def test_each_model_is_answered_by_itself_and_stays_as_long_as_it_is_told(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="makes no embeddings"):
        client.embed(CHAT, "Hi")
    user = {"role": "user", "content": "Hey"}
    assert client.chat(CHAT, [user], options={"num_predict": 8}, keep_alive=-1).message.content
    until = {each.model: each.expires_at for each in client.ps().models}
    assert until[f"{CHAT}:latest"].year == 9999
    assert client.generate(CHAT, keep_alive="10m").done_reason == "load"
    until = {each.model: each.expires_at for each in client.ps().models}
    assert until[f"{CHAT}:latest"].year < 9999
    assert client.generate(CHAT, keep_alive=0).done_reason == "unload"
    wait_until_unloaded(client)


def test_langchain_unloads_a_model_after_its_reply(server: ServeProcess, client: ollama.Client) -> None:
    assert ChatOllama(model=CHAT, base_url=server.url, num_predict=4, keep_alive=0).invoke("Hey").content
    wait_until_unloaded(client)


def test_a_pulled_model_is_served_until_it_is_deleted(client: ollama.Client) -> None:
    first, *_, last = [part.status for part in client.pull("hf.co/org/tiny", stream=True)]
    assert (first, last) == ("pulling manifest", "success")
    assert client.embed("hf.co/org/tiny", TEXTS).embeddings == client.embed(VECTORS, TEXTS).embeddings
    assert client.pull("hf.co/org/tiny").status == "success"
    assert "hf.co/org/tiny:latest" in {each.model for each in client.list().models}
    assert client.delete("hf.co/org/tiny").status == "success"
    assert len(client.list().models) == 2


def test_models_are_pulled_from_the_hub_alone_and_the_operators_are_not_deleted(client: ollama.Client) -> None:
    assert [part.status for part in client.pull(CHAT, stream=True)] == ["success"]
    for ask, status in (
        (lambda: client.pull("/etc/passwd"), 404),
        (lambda: client.pull("llama3.2"), 404),
        (lambda: client.delete(CHAT), 403),
    ):
        with pytest.raises(ollama.ResponseError) as raised:
            ask()
        assert raised.value.status_code == status and raised.value.error
    with pytest.raises(ollama.ResponseError, match="cannot be had"):
        list(client.pull("hf.co/org/none:Q4_0", stream=True))
    assert len(client.list().models) == 2
