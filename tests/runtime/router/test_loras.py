"""LoRA adapters of several models: each is a name of its model, and reaches that model's own server."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.cache_namespace import CacheScope, adapted_namespace
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.router.model_row import ModelSpec

from .served_models import Models
from .test_app import CHAT, run

SPECS = (
    ModelSpec("small", "small.gguf"),
    ModelSpec("large", "large.gguf", aliases=("big", "*"), loras=("sql", "law")),
    ModelSpec("wide", "wide.gguf", loras=("sql",)),
)


def test_a_request_names_its_model_and_adapter_whether_loaded_or_not() -> None:
    async def play(found: Models) -> None:
        for name, model, lora in (
            *(("wide:sql", "wide", "sql"), ("large:sql", "large", "sql"), ("big:law", "large", "law")),
            *(("small", "small", None), ("big", "large", None), ("wide", "wide", None)),
        ):
            for path in ("/v1/chat/completions", "/api/chat"):
                answer = await found.client.post(path, json=CHAT | {"model": name, "stream": False})
                assert answer.status_code == 200 and f"I am {model}" in answer.text and answer.json()["model"] == name
                assert found.engines[model].options[-1].lora == lora

    run(play, *SPECS)


def test_adapters_are_listed_with_their_model_before_and_after_it_is_loaded() -> None:
    adapters = [("large:sql", "large"), ("large:law", "large"), ("wide:sql", "wide")]

    async def play(found: Models) -> None:
        async def check() -> None:
            listed = (await found.client.get("/v1/models")).json()["data"]
            assert [each["id"] for each in listed if "parent" not in each] == ["small", "large", "big", "wide"]
            assert [(each["id"], each["parent"]) for each in listed if "parent" in each] == adapters
            assert (await found.client.get("/v1/models/big:law")).json()["parent"] == "large"
            assert (await found.client.get("/v1/models/anything")).json().get("parent") is None

        await check()
        loaded = await found.client.post("/models/load", json={"model": "large:law"})
        assert loaded.json()["id"] == "large" and found.states == ["unloaded", "loaded", "unloaded"]
        await check()

    run(play, *SPECS)


def test_an_unknown_adapter_is_404_with_the_names_of_all() -> None:
    async def play(found: Models) -> None:
        for name in ("wide:law", "small:sql", "sql"):
            answer = await found.client.post("/v1/chat/completions", json=CHAT | {"model": name})
            assert answer.status_code == 404 and "'small' and 'wide' and 'wide:sql'" in answer.text
        assert found.loaded == []

    run(play, SPECS[0], SPECS[2])


def test_the_cache_of_an_adapter_is_shown_and_forgotten_alone() -> None:
    async def play(found: Models) -> None:
        await found.client.post("/models/load", json={"model": "large"})
        engine = found.engines["large"]
        own = engine.namespaces.of(CacheScope())
        for name, namespace in (("large:sql", adapted_namespace(own, "sql")), ("large", own)):
            shown = await found.client.get("/v1/cache", params={"model": name})
            assert shown.status_code == 200 and engine.namespaces_asked.pop() == namespace
            forgotten = await found.client.delete("/v1/cache", params={"model": name})
            assert forgotten.status_code == 200 and engine.namespaces_cleared[-1] == namespace

    run(play, *SPECS)


def test_two_models_cannot_have_the_name_of_an_adapter() -> None:
    async def play(found: Models) -> None:
        raise AssertionError("there is no such server")

    with pytest.raises(InvalidParameter, match="two models have the name 'wide:sql'"):
        run(play, ModelSpec("wide:sql", "x"), SPECS[2])
