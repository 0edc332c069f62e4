"""The `openai` package: chat, completions and responses, whole and streamed, with all that comes along."""

from __future__ import annotations

import asyncio
import math
import uuid

import openai
import pytest

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, QUESTION

HI = [{"role": "user", "content": QUESTION}]
GREEDY = {"model": MODEL, "messages": HI, "max_tokens": 16, "temperature": 0}


def test_a_chat_and_its_usage(client: openai.OpenAI, said: str) -> None:
    reply = client.chat.completions.create(**GREEDY)
    assert reply.object == "chat.completion" and reply.model == MODEL
    (choice,) = reply.choices
    assert choice.message.role == "assistant" and choice.message.content == said
    assert choice.finish_reason in ("stop", "length")
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert client.chat.completions.create(**GREEDY).usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY)
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert all(c.usage is None for c in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_the_streaming_helper_understands_every_event(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**GREEDY, logprobs=True) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta"} <= kinds
    assert final.choices[0].message.content == client.chat.completions.create(**GREEDY).choices[0].message.content


@pytest.mark.parametrize("streams", [False, True])
def test_several_choices(client: openai.OpenAI, streams: bool) -> None:
    asked = {**GREEDY, "n": 3, "temperature": 1.0, "seed": 5}
    if streams:
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        choices = client.chat.completions.create(**asked).choices
        assert [choice.index for choice in choices] == [0, 1, 2]
        texts = [choice.message.content for choice in choices]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in client.chat.completions.create(**asked).choices]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    content = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert content
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token and len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0, "greedy takes the most likely"
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001


def test_completions_of_text_ids_and_lists(client: openai.OpenAI, server: ServeProcess) -> None:
    asked = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    one = client.completions.create(prompt="The capital of France is", **asked)
    assert one.object == "text_completion" and one.choices[0].text
    ids = server.json("/tokenize", {"prompt": "The capital of France is"})["tokens"]
    assert client.completions.create(prompt=ids, **asked).choices[0].text == one.choices[0].text
    two = client.completions.create(prompt=["The capital of France is", "One, two,"], **asked)
    assert [choice.index for choice in two.choices] == [0, 1] and two.choices[0].text == one.choices[0].text
    lists = client.completions.create(prompt=[ids, ids], **asked)
    assert [choice.text for choice in lists.choices] == [one.choices[0].text] * 2
    streamed = client.completions.create(prompt="The capital of France is", stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in streamed) == one.choices[0].text


def test_echo_and_logprobs_of_a_completion(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0, "logprobs": 2}
    bare = client.completions.create(**asked).choices[0]
    assert len(bare.logprobs.tokens) == len(bare.logprobs.token_logprobs) == len(bare.logprobs.top_logprobs) == 4
    echoed = client.completions.create(**{**asked, "logprobs": None}, echo=True).choices[0]
    assert echoed.text == asked["prompt"] + bare.text


def test_sampling_parameters_are_taken(client: openai.OpenAI, said: str) -> None:
    asked = {**GREEDY, "temperature": 0.9, "top_p": 0.8, "seed": 3, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    first = client.chat.completions.create(**asked, user="someone", extra_body={"top_k": 20, "min_p": 0.01})
    assert first == client.chat.completions.create(
        **asked, user="other", extra_body={"top_k": 20, "min_p": 0.01}
    ).model_copy(update={"id": first.id, "created": first.created, "usage": first.usage})
    stopped = client.chat.completions.create(**GREEDY, stop=["no such", said[5:9]]).choices[0]
    assert (stopped.finish_reason, stopped.message.content) == ("stop", said[: said.index(said[5:9])])
    biased = client.completions.create(model=MODEL, prompt="A", max_tokens=3, logit_bias={"30": 100})
    assert biased.choices[0].text == "..."
    modern = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    assert client.chat.completions.create(**modern, max_completion_tokens=2).usage.completion_tokens == 2


def test_a_reply_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**GREEDY).choices[0].message
    more = [*HI, message, {"role": "user", "content": [{"type": "text", "text": "And of Spain?"}]}]
    reply = client.chat.completions.create(**{**GREEDY, "messages": more})
    assert reply.usage.prompt_tokens_details.cached_tokens > len(HI[0]["content"].split())


def test_responses_whole_and_streamed(client: openai.OpenAI, said: str) -> None:
    asked = {"model": MODEL, "input": HI[0]["content"], "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.object == "response" and whole.status in ("completed", "incomplete")
    assert whole.output_text == said
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.input_tokens_details.cached_tokens >= 0
    with_roles = {**asked, "input": HI, "instructions": "Answer in one word."}
    assert client.responses.create(**with_roles).output_text
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created" and events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_text == text


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_a_client_that_has_enough_leaves_and_its_request_ends(client: openai.OpenAI, server: ServeProcess) -> None:
    asked = {**GREEDY, "max_tokens": 1500, "messages": [{"role": "user", "content": "Tell me a very long story."}]}
    with client.chat.completions.create(**asked, stream=True) as stream:
        for _, _ in zip(range(3), stream, strict=False):
            pass
    server.wait_until_idle()
    assert server.json("/v1/cache")["requests"][0]["finish_reason"] == "cancelled"
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(**{**asked, "extra_body": {"ignore_eos": True}})
    server.wait_until_idle()


def test_many_at_once(server: ServeProcess) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        messages = [{"role": "user", "content": f"Say the number {number}."}]
        stream = await client.chat.completions.create(**{**GREEDY, "messages": messages}, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def ask_all() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(24)))
            return together, [await ask(client, number) for number in range(24)]

    together, alone = asyncio.run(ask_all())
    assert together == alone


# Errors, as the classes that programs catch.


@pytest.mark.parametrize(
    ("wrong", "kind", "code", "param"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found", "model"),
        ({"temperature": -1}, openai.BadRequestError, None, ...),
        ({"temperature": "hot"}, openai.BadRequestError, None, "temperature"),
        ({"messages": []}, openai.BadRequestError, None, ...),
        ({"n": 10**9}, openai.BadRequestError, None, ...),
        ({"logprobs": True, "top_logprobs": 10**6}, openai.BadRequestError, None, ...),
        ({"max_tokens": -2}, openai.BadRequestError, None, ...),
        ({"extra_body": {"temprature": 1}}, openai.BadRequestError, None, "temprature"),
        (
            {"messages": [{"role": "user", "content": "word " * 9000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            ...,
        ),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_mistakes_are_said_before_anything_is_streamed(
    client: openai.OpenAI,
    wrong: dict,
    kind: type[openai.APIStatusError],
    code: str | None,
    param: object,
    streams: bool,
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{**GREEDY, **wrong}, stream=streams)
    assert caught.value.code == code and caught.value.message
    assert param is ... or caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_other_errors_have_their_classes(client: openai.OpenAI, server: ServeProcess) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        client.with_options(api_key="sk-" + uuid.uuid4().hex).models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with pytest.raises(openai.BadRequestError, match="makes no embeddings"):
        client.embeddings.create(model=MODEL, input="x")
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=MODEL, prompt="x" * (40 << 20))
    assert large.value.status_code == 413
    with pytest.raises(openai.APIConnectionError):
        client.with_options(base_url="http://127.0.0.1:9/v1").models.list()


def test_a_full_queue_is_a_rate_limit_and_the_client_comes_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = ("--kv-cache-gb", "0.2", "--max-num-seqs", "1", "--max-queue", "0")
    long = {**GREEDY, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    long.pop("model"), (short := dict(GREEDY)).pop("model")
    with ServeProcess(*options, log=tmp_path_factory.mktemp("full") / "log") as server:
        model = server.json("/v1/models")["data"][0]["id"]
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with client.chat.completions.create(model=model, **long, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                client.chat.completions.create(model=model, **short)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        server.wait_until_idle()
        patient = client.with_options(max_retries=3)
        assert patient.chat.completions.create(model=model, **short).choices[0].message.content
