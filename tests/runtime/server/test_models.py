"""Several models in one process: each request reaches its own, and what befalls one harms no request of another."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, CacheScope, ModelIdentity
from radixlm.runtime.cache.cache_tree import CacheCleared, CacheTree
from radixlm.runtime.engine.completion import CacheMatch, Completion, Delta, Timings, Usage
from radixlm.runtime.engine.engine import GenerationStream
from radixlm.runtime.errors import EngineDied, InvalidParameter, RadixLMError
from radixlm.runtime.server import create_app
from radixlm.runtime.server.app import app_of
from radixlm.runtime.server.models import Models
from radixlm.runtime.server.served import Served
from radixlm.runtime.server.server_options import ServerOptions
from starlette.testclient import TestClient

from .conftest import FakeEngine
from .test_work_queues import LONG, StandingEngine, until

NAMES = ("small", "large")
DIED = EngineDied(SystemExit("out of everything"), is_final=True)


class DrivenStream(GenerationStream):
    """One letter a delta, and only when the test says so."""

    def __init__(self, text: str, on_ready: Callable[[], None] | None) -> None:
        self.prompt_token_ids, self.progress = (1, 2, 3), None
        self._text = text
        self._num_delivered = 0
        self._there: list[Delta | RadixLMError] = []
        self._notify = on_ready or (lambda: None)
        self.is_over = False

    def step(self) -> None:
        """Deliver the next letter."""
        self._num_delivered += 1
        self.is_over = self._num_delivered == len(self._text)
        letter = self._text[self._num_delivered - 1]
        self._put(Delta(letter, (self._num_delivered,), finish_reason="stop" if self.is_over else None))

    def fail(self, error: RadixLMError) -> None:
        self.is_over = True
        self._put(error)

    def cancel(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._put(Delta("", (), finish_reason="cancelled"))

    def poll(self) -> Delta | None:
        if not self._there:
            return None
        item = self._there.pop(0)
        if isinstance(item, RadixLMError):
            raise item
        return item

    def result(self) -> Completion:
        usage, match = Usage(3, len(self._text), 0, {}), CacheMatch(None, 0, None)
        ids = tuple(range(len(self._text)))
        return Completion(self._text, ids, (1, 2, 3), None, "stop", usage, Timings(0.1, 1.0, 0.2, 0.0), match)

    def _put(self, item: Delta | RadixLMError) -> None:
        self._there.append(item)
        self._notify()


@dataclass
class DrivenEngine(FakeEngine):
    """Answers each prompt with its own name and the prompt; its tokens are counted and spelled by its name, too."""

    name: str = "fake"
    driven: list[DrivenStream] = field(default_factory=list)
    died_of: RadixLMError | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        info = SimpleNamespace(bos_token_id=0, eos_token_ids=(1,), add_bos_token=False)
        target = SimpleNamespace(numeric_class="fma")
        self.manifest = SimpleNamespace(name=self.name, digest=64 * self.name[0], tokenizer=info, target=target)
        self.namespaces = CacheNamespaces(ModelIdentity(), self.name.encode())
        self.prompts = SimpleNamespace(chat_template=None)

    def stream(self, prompt: Any, params: Any, *, options: Any, on_ready: Any = None) -> Any:
        self._require_life()
        said = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        self.asked.append((said, params))
        self.namespaces_asked.append(options.namespace)
        self.driven.append(DrivenStream(f"{self.name}:{said[:9]}", on_ready))
        return self.driven[-1]

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        return [len(self.name), *range(len(text))]

    def encode_chat(self, messages: Any, tools: object = (), template_kwargs: object = None) -> list[int]:
        return [*range(100 * len(self.name) + len(messages[-1]["content"]))]

    def decode(self, token_ids: Iterable[int]) -> str:
        return f"{self.name}:{[*token_ids]}"

    def cache_tree(self, namespace: bytes) -> CacheTree:
        self._require_life()
        return super().cache_tree(namespace)

    def clear_cache(self, namespace: bytes) -> CacheCleared:
        self._require_life()
        return super().clear_cache(namespace)

    def die(self) -> None:
        self.died_of = DIED
        self.engine_stats = replace(self.engine_stats, alive=False, crash="SystemExit")
        for stream in self.driven:
            if not stream.is_over:
                stream.fail(DIED)

    def _require_life(self) -> None:
        if self.died_of is not None:
            raise self.died_of


Engines = dict[str, DrivenEngine]


@pytest.fixture
def engines() -> Engines:
    return {name: DrivenEngine(name=name) for name in NAMES}


@pytest.fixture
def both(engines: Engines) -> TestClient:
    return TestClient(create_app(engines), raise_server_exceptions=False)  # type: ignore[arg-type]


def _streamed(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _of_chat(said: Any) -> str:
    if isinstance(said, list):
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said)
    return str(said["choices"][0]["message"]["content"])


def _of_completion(said: Any) -> str:
    if isinstance(said, list):
        return "".join(chunk["choices"][0]["text"] for chunk in said)
    return str(said["choices"][0]["text"])


def _of_response(said: Any) -> str:
    whole = said[-1]["response"] if isinstance(said, list) else said
    return str(whole["output"][-1]["content"][0]["text"])


def _of_message(said: Any) -> str:
    if isinstance(said, list):
        return "".join(event["delta"].get("text", "") for event in said if event["type"] == "content_block_delta")
    return str(said["content"][0]["text"])


def _model_in(said: Any) -> str:
    first = said[0] if isinstance(said, list) else said
    return str((first.get("response") or first.get("message") or first)["model"])


def _talk(mark: str) -> list[Any]:
    return [{"role": "user", "content": mark}]


GENERATING: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[Any], str]]] = {
    "/v1/chat/completions": (lambda mark: {"messages": _talk(mark)}, _of_chat),
    "/v1/completions": (lambda mark: {"prompt": mark}, _of_completion),
    "/v1/responses": (lambda mark: {"input": mark}, _of_response),
    "/v1/messages": (lambda mark: {"messages": _talk(mark), "max_tokens": 99}, _of_message),
}
COUNTING: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str, str], Any]]] = {
    "/tokenize": (
        lambda mark: {"prompt": mark},
        lambda name, mark: {"count": 1 + len(mark), "max_model_len": 512, "tokens": [len(name), *range(len(mark))]},
    ),
    "/detokenize": (lambda mark: {"tokens": [7, len(mark)]}, lambda name, mark: {"prompt": f"{name}:[7, {len(mark)}]"}),
    "/v1/messages/count_tokens": (
        lambda mark: {"messages": _talk(mark)},
        lambda name, mark: {"input_tokens": 100 * len(name) + len(mark)},
    ),
}


@dataclass(frozen=True)
class Wanted:
    """One request, and what its model answers."""

    path: str
    model: str
    mark: str
    streams: bool

    async def ask(self, client: httpx.AsyncClient) -> tuple[int, Any]:
        """Status and body of the answer, whose events are in a list."""
        make = (GENERATING | COUNTING)[self.path][0]
        body = make(self.mark) | {"model": self.model}
        if self.path in GENERATING:
            body |= {"stream": self.streams, "cache_salt": self.mark}
        answer = await client.post(self.path, json=body)
        is_stream = answer.headers["content-type"].startswith("text/event-stream")
        return answer.status_code, _streamed(answer.text) if is_stream else answer.json()

    def check(self, said: Any) -> None:
        """It is what this model says to this request, whole, and nothing else."""
        if self.path in COUNTING:
            assert said == COUNTING[self.path][1](self.model, self.mark)
            return
        assert GENERATING[self.path][1](said) == f"{self.model}:{self.mark}"
        assert _model_in(said) == self.model


@asynccontextmanager
async def _client_of(engines: Mapping[str, FakeEngine], **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engines, **options), raise_app_exceptions=False)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", verify=False) as client:
        yield client


async def _drive(wanted: list[Wanted], engines: Engines, chance: random.Random, kills: str | None) -> list[Any]:
    """Ask all, begin them and deliver their letters in any order; a model that is killed dies at some moment."""
    async with _client_of(engines) as client:
        waiting, tasks = list(wanted), list[asyncio.Task[Any]]()
        dies_after = chance.randrange(40) if kills else -1
        turn = 0
        while waiting or not all(task.done() for task in tasks):
            live = [stream for engine in engines.values() for stream in engine.driven if not stream.is_over]
            if kills and turn == dies_after:
                engines[kills].die()
            elif waiting and (not live or chance.random() < 0.3):
                tasks.append(asyncio.create_task(waiting.pop(0).ask(client)))
            elif live:
                chance.choice(live).step()
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            if not live:
                await asyncio.sleep(0.001)  # for threads
            turn += 1
        return [task.result() for task in tasks]


REQUESTS = st.lists(
    st.builds(
        Wanted,
        st.sampled_from([*GENERATING, *COUNTING]),
        st.sampled_from(NAMES),
        st.text("abc", min_size=1, max_size=5),
        st.booleans(),
    ),
    min_size=2,
    max_size=12,
)


@given(REQUESTS, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_however_requests_interleave_each_is_answered_by_its_model(wanted: list[Wanted], chance: random.Random) -> None:
    engines = {name: DrivenEngine(name=name) for name in NAMES}
    for want, (status, said) in zip(wanted, asyncio.run(_drive(wanted, engines, chance, None)), strict=True):
        assert status == 200
        want.check(said)
    for name, engine in engines.items():
        own = [want for want in wanted if want.model == name and want.path in GENERATING]
        assert sorted(str(said) for said, _ in engine.asked) == sorted(want.mark for want in own)
        namespaces = [engine.namespaces.of(CacheScope(cache_salt=want.mark)) for want in own]
        assert sorted(engine.namespaces_asked) == sorted(namespaces), "keyed by the model's own secret"


@given(REQUESTS, st.randoms(use_true_random=False), st.sampled_from(NAMES))
@settings(max_examples=30, deadline=None)
def test_a_model_that_dies_at_any_moment_harms_no_request_of_another(
    wanted: list[Wanted], chance: random.Random, killed: str
) -> None:
    engines = {name: DrivenEngine(name=name) for name in NAMES}
    answers = asyncio.run(_drive(wanted, engines, chance, killed))
    for want, (status, said) in zip(wanted, answers, strict=True):
        if want.model != killed or want.path in COUNTING:
            assert status == 200
            want.check(said)
        elif "died" not in json.dumps(said):
            want.check(said)  # it had ended by then


def test_a_model_whose_queue_is_full_refuses_its_own_requests_only() -> None:
    full, free = StandingEngine(), DrivenEngine(name="large")
    full.max_num_requests = full.room = 8

    async def run() -> None:
        async with _client_of({"small": full, "large": free}) as client:
            ask = {"prompt": LONG, "model": "small"}
            flood = [asyncio.create_task(client.post("/v1/completions", json=ask)) for _ in range(30)]
            await until(lambda: sum(task.done() for task in flood) >= 30 - 8 - 2)
            other = asyncio.create_task(client.post("/v1/completions", json=ask | {"model": "large"}))
            await until(lambda: bool(free.driven))
            while not free.driven[0].is_over:
                free.driven[0].step()
            assert (await other).json()["choices"][0]["text"] == f"large:{LONG[:9]}"
            assert sum(task.done() for task in flood) == 30 - 8 - 2
            full.let_go.set()
            assert {(await task).status_code for task in flood} == {200, 429}

    asyncio.run(run())


def test_all_are_listed_and_described(both: TestClient, engines: Engines) -> None:
    engines["large"].context_length = 4096
    listed = both.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == [*NAMES]
    assert (listed["first_id"], listed["last_id"]) == NAMES
    for name, length in zip(NAMES, (512, 4096), strict=True):
        assert both.get(f"/v1/models/{name}").json()["max_model_len"] == length
    assert both.get("/tokenizer_info", params={"model": "large"}).json()["eos_token"] == "large:[1]"


@pytest.mark.parametrize("path", [*GENERATING, *COUNTING])
def test_an_unknown_name_is_404_on_every_path_and_reaches_no_model(
    both: TestClient, engines: Engines, path: str
) -> None:
    answer = both.post(path, json=(GENERATING | COUNTING)[path][0]("a") | {"model": "other"})
    assert answer.status_code == 404 and "'small' and 'large'" in answer.json()["error"]["message"]
    assert not any(engine.asked for engine in engines.values())


@pytest.mark.parametrize("path", COUNTING)
def test_a_request_that_names_no_model_is_the_firsts(both: TestClient, path: str) -> None:
    make, expected = COUNTING[path]
    assert both.post(path, json=make("abc")).json() == expected("small", "abc")
    assert both.get("/tokenizer_info").json()["eos_token"] == "small:[1]"


def test_each_has_aliases_options_and_a_fingerprint_of_its_own(engines: Engines) -> None:
    options = ServerOptions(is_strict=True)
    small = Served.of(engines["small"], replace(options, model_ids=("small", "mini")))  # type: ignore[arg-type]
    large = Served.of(engines["large"], replace(options, model_ids=("large", "*"), ignores_prompt_cache_key=True))  # type: ignore[arg-type]
    client = TestClient(app_of(Models([small, large], options)))
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["small", "mini", "large"]
    for name, said in {"mini": "small", "small": "small", "large": "large", "gpt-4o": "large"}.items():
        assert client.post("/detokenize", json={"model": name, "tokens": []}).json()["prompt"] == f"{said}:[]"
    assert small.fingerprint != large.fingerprint
    for query in ("?model=small&prompt_cache_key=a", "?model=large&prompt_cache_key=a"):
        client.get("/v1/cache" + query)
    keyed, bare = CacheScope(prompt_cache_key="a"), CacheScope()
    assert engines["small"].namespaces_asked == [engines["small"].namespaces.of(keyed)]
    assert engines["large"].namespaces_asked == [engines["large"].namespaces.of(bare)]


def test_where_there_are_several_the_query_that_names_one_is_described(both: TestClient, engines: Engines) -> None:
    def named(client: TestClient) -> list[tuple[str, str]]:
        paths = client.get("/openapi.json").json()["paths"]
        asked = [(path, method, each.get("parameters", ())) for path in paths for method, each in paths[path].items()]
        return [(path, method) for path, method, fields in asked if "model" in [field["name"] for field in fields]]

    assert named(both) == [("/v1/cache", "get"), ("/v1/cache", "delete"), ("/tokenizer_info", "get")]
    assert named(TestClient(create_app(engines["small"]))) == []  # type: ignore[arg-type]


def test_two_models_have_no_name_in_common(engines: Engines) -> None:
    small, large = engines.values()
    options = ServerOptions(model_ids=("same",))
    with pytest.raises(InvalidParameter, match="the same name"):
        Models([Served.of(small, options), Served.of(large, options)], options)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="model_ids names a single model"):
        create_app(engines, model_ids=["same"])  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="there is no model"):
        create_app({})


def test_a_cache_is_shown_of_one_model_and_forgotten_of_one_or_of_all(both: TestClient, engines: Engines) -> None:
    small, large = engines.values()
    both.get("/v1/cache", params={"model": "large", "cache_salt": "a"})
    assert (small.namespaces_asked, len(large.namespaces_asked)) == ([], 1)
    assert both.get("/v1/cache").json()["object"] == "cache" and len(small.namespaces_asked) == 1
    assert both.delete("/v1/cache", params={"model": "large"}).json()["num_freed_pages"] == 3
    assert (len(small.namespaces_cleared), len(large.namespaces_cleared)) == (0, 1)
    assert both.delete("/v1/cache").json()["num_freed_pages"] == 6
    assert (len(small.namespaces_cleared), len(large.namespaces_cleared)) == (1, 2)
    assert both.get("/v1/cache", params={"model": "other"}).status_code == 404
    assert both.delete("/v1/cache", params={"modle": "large"}).status_code == 400


@pytest.mark.parametrize("killed", NAMES)
def test_what_is_to_be_forgotten_is_forgotten_by_all_that_can_though_one_fails(
    both: TestClient, engines: Engines, killed: str
) -> None:
    engines[killed].die()
    assert both.delete("/v1/cache").status_code == 500
    assert [len(engine.namespaces_cleared) for engine in engines.values()] == [int(name != killed) for name in NAMES]


def test_health_says_each_and_is_well_while_one_serves(both: TestClient, engines: Engines) -> None:
    body = both.get("/health").json()
    assert (body["status"], body["reason"]) == ("ready", None)
    assert [(name, each["status"]) for name, each in body["models"].items()] == [(name, "ready") for name in NAMES]
    engines["large"].die()
    answer = both.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["reason"].startswith("large: the engine's thread died")
    assert {name: each["status"] for name, each in answer.json()["models"].items()} == {
        "small": "ready",
        "large": "degraded",
    }
    engines["small"].die()
    assert both.get("/health").status_code == 503


def test_health_names_no_model_to_clients_without_a_key(engines: Engines) -> None:
    client = TestClient(create_app(engines, api_keys=["sk-one"]))  # type: ignore[arg-type]
    engines["large"].die()
    told = client.get("/health")
    assert told.json()["reason"].startswith("the engine's thread died")
    assert not any(name in told.text for name in NAMES)
    assert set(client.get("/health", headers={"authorization": "Bearer sk-one"}).json()["models"]) == {*NAMES}


def test_what_metrics_tell_of_a_model_has_its_name_where_there_are_several(both: TestClient, engines: Engines) -> None:
    engines["large"].engine_stats = replace(engines["large"].engine_stats, num_generated_tokens=7)
    families = [*text_string_to_metric_families(both.get("/metrics").text)]
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    of_app = {sample.name for sample in samples if "model" not in sample.labels}
    assert of_app <= {"radixlm_http_responses_total"}
    generated = {s.labels["model"]: s.value for s in samples if s.name == "radixlm_generated_tokens_total"}
    assert generated == {"small": 0, "large": 7}
    one = TestClient(create_app(engines["small"])).get("/metrics").text  # type: ignore[arg-type]
    labelled = {s.name for f in text_string_to_metric_families(one) for s in f.samples if "model" in s.labels}
    assert labelled == {"radixlm_build_info"}


def test_a_prompt_is_logged_unless_its_own_model_keeps_none(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "radixlm.requests")
    engines["large"].match = "off"
    both = TestClient(create_app(engines, logs_prompts=True))  # type: ignore[arg-type]
    for body in (
        {"model": "small"},
        {"model": "large"},
        {},
        {"model": "small", "prompt": "a secret", "return_token_strs": 5},
    ):
        both.post("/tokenize", json={"prompt": "a secret"} | body)
    prompts = [record.fields["prompt"] for record in caplog.records if record.name == "radixlm.requests"]  # type: ignore[attr-defined]
    assert prompts == ["a secret", None, "a secret", None], "of a body that is wrong nobody knows whose it is"
