"""Run the turns of a file on an engine with known replies, and measure how much of each prompt is cached.

A file has a conversation, or the bodies of requests. Knows turns, known replies and the engine. `command.py` prints the
results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

if TYPE_CHECKING:
    from radixlm.runtime import Completion, SamplingParams
    from radixlm.runtime.artifact import Artifact
    from radixlm.runtime.cache.why_not_more import WhyNotMore
    from radixlm.runtime.model.batch import Runner
    from radixlm.runtime.server.openai.chat_request import ChatRequest
    from radixlm.runtime.server.openai.requests import CompletionRequest

Reply = str | tuple[int, ...]
EXPECTED = (
    'a JSON list of messages, {"role": ..., "content": ...}, or of the bodies of requests, {"messages": [...]} or '
    '{"prompt": ...}'
)
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class ReplyTo:
    """A placeholder for the reply to an earlier turn, by its index."""

    place: int


@dataclass(frozen=True)
class Turn:
    """A request, and the model's reply to it: its text, its token ids, or None if it is to be generated.

    The messages of `body` may include a `ReplyTo`.
    """

    body: Mapping[str, Any]
    reply: Reply | None

    def request(self, replies: Sequence[str]) -> ChatRequest | CompletionRequest:
        """Return the decoded request, with the replies to earlier turns inserted.

        Raises:
            msgspec.ValidationError: the body is not a request.
        """
        from radixlm.runtime.server.openai.chat_request import ChatRequest
        from radixlm.runtime.server.openai.requests import CompletionRequest

        if "messages" not in self.body:
            return msgspec.convert(self.body, CompletionRequest)
        messages = self.body["messages"]
        if isinstance(messages, list):
            messages = [
                _assistant_message(replies[item.place]) if isinstance(item, ReplyTo) else item for item in messages
            ]
        return msgspec.convert({**self.body, "messages": messages}, ChatRequest)


def read_turns(data: bytes) -> list[Turn]:
    """Return the turns of a file, in order, each with its reply if the file has it: as token ids or text.

    Replies are assistant messages, whose ids are `token_ids`, and the `reply` of requests.

    Raises:
        ValueError: the file is not valid; the message says why.
    """
    try:
        items = msgspec.json.decode(data, type=list[dict[str, Any]])
        turns = _turns_of_conversation(items) if items and "role" in items[0] else _turns_of_requests(items)
        for turn in turns:
            turn.request([""] * len(turns))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"the turns must be {EXPECTED}: {error}") from error
    if not turns:
        raise ValueError(f"the file has no turns; it must be {EXPECTED}")
    return turns


def _turns_of_conversation(items: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns of a conversation: one for each reply, and one for each question without a reply."""
    from radixlm.runtime.server.openai.messages import ChatMessage

    turns: list[Turn] = []
    history: list[dict[str, Any] | ReplyTo] = []
    for item, after in pairwise([*items, _NOTHING]):
        history.append(_without_ids(item))
        msgspec.convert(history[-1], ChatMessage)
        if after.get("role") == "assistant":
            turns.append(Turn({"messages": [*history]}, _reply_of(after)))
        elif item.get("role") == "user":
            turns.append(Turn({"messages": [*history]}, None))
            history.append(ReplyTo(len(turns) - 1))
    return turns


def _turns_of_requests(items: Sequence[dict[str, Any]]) -> list[Turn]:
    """Return the turns of request bodies. A missing `reply` is taken from a later request that continues this one."""
    turns = []
    for number, item in enumerate(items, 1):
        body = {name: value for name, value in item.items() if name != "reply"}
        reply = msgspec.convert(item.get("reply"), Reply | None)
        if isinstance(body.get("messages"), list):
            messages = [_without_ids(message) for message in body["messages"]]
            body["messages"] = messages
            if reply is None:
                reply = _find_reply(item["messages"], [later.get("messages") for later in items[number:]])
        turns.append(Turn(body, reply))
    return turns


def _find_reply(messages: list[Any], later: Sequence[object]) -> Reply | None:
    """Return the assistant message that follows these messages in a later request, or None."""
    for others in later:
        if isinstance(others, list) and others[: len(messages)] == messages and len(others) > len(messages):
            answer = others[len(messages)]
            if isinstance(answer, dict) and answer.get("role") == "assistant":
                return _reply_of(answer)
    return None


def _reply_of(message: Mapping[str, Any]) -> Reply:
    """Return the known reply in an assistant message: its `token_ids`, or else its text."""
    reply: Reply = msgspec.convert(message.get("token_ids", message.get("content")), Reply)
    return reply


def _assistant_message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _without_ids(message: Any) -> Any:
    return {k: v for k, v in message.items() if k != "token_ids"} if isinstance(message, dict) else message


@dataclasses.dataclass(frozen=True)
class Played:
    """The result of a turn: how much of its prompt was cached, and why the cached prefix ends."""

    num_prompt_tokens: int
    num_cached_tokens: int
    tokens_by_kind: Mapping[str, int]
    why_not_more: WhyNotMore


class Playback:
    """An engine that runs all turns. A context manager.

    Args:
        options: the engine's options.
        max_tokens: maximum length of a generated reply.
        generates: generate missing replies with the model; otherwise they are empty.

    Raises:
        ArtifactError: the artifact cannot be used.
    """

    def __init__(self, artifact: Path, options: Mapping[str, Any], *, max_tokens: int, generates: bool) -> None:
        from radixlm.runtime import Engine

        self._max_tokens, self._generates = max_tokens, generates
        self._replies: list[str] = []
        self._engine = Engine(artifact, **options, idle_work=False, speculate="off", open_runner=self._open_runner)
        eos_ids = self._engine.manifest.tokenizer.eos_token_ids
        self._end = eos_ids[:1] or (0,)

    def play(self, turn: Turn) -> Played:
        """Run the turn's request with the known reply as the model's output, and measure what was cached.

        Returns:
            The number of the prompt's tokens and of cached ones, those by kind of match, and why no more were cached.

        Raises:
            ValueError: the request is refused, or the reply has ids outside the vocabulary.
        """
        from radixlm.runtime.cache.cache_namespace import CacheScope, adapted_namespace

        request = turn.request(self._replies)
        namespace = self._engine.namespaces.of(
            CacheScope(cache_salt=request.cache_salt, prompt_cache_key=request.prompt_cache_key)
        )
        adapters = self._engine.adapters
        lora = adapters.of_model(request.model)
        params = self._script_reply(request, turn.reply)
        completion = self._ask(request, params, namespace=namespace, lora=lora)
        self._runner.script.clear()
        self._replies.append(completion.text)
        why = completion.cache_match.why_not_more
        assert why is not None, "it was admitted"
        if why.kind not in ("complete", "off"):
            own = namespace if lora is None else adapted_namespace(namespace, adapters.named(lora).digest)
            elsewhere = self._engine.num_cached_elsewhere(completion.prompt_token_ids, own)
            why = dataclasses.replace(why, kind="namespace") if elsewhere > why.position else why
        usage = completion.usage
        return Played(usage.prompt_tokens, usage.cached_tokens, usage.tokens_by_kind, why)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def _open_runner(self, artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
        """Open the engine's runner, which outputs the ids of its `script` as replies.

        Without scripted ids the model generates; if missing replies are not generated, no model is loaded.
        """
        from radixlm.runtime.model.memory import AdapterRows
        from radixlm.runtime.model.scripted_runner import ScriptedRunner

        model: Runner | None = None
        adapters = AdapterRows(artifact.manifest.lora, max_tokens=1) if artifact.manifest.lora else None
        if self._generates:
            from radixlm.runtime.model.model_runner import ModelRunner

            model = ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads)
            adapters = model.adapters
        self._runner = ScriptedRunner(artifact.manifest.model.vocab_size, model, adapters)
        return self._runner

    def _ask(
        self,
        request: ChatRequest | CompletionRequest,
        params: SamplingParams,
        *,
        namespace: bytes,
        lora: str | None,
    ) -> Completion:
        """Run a chat or completion request on the engine in a cache namespace; return its completion."""
        from radixlm.runtime.engine.request_options import RequestOptions
        from radixlm.runtime.server.openai.chat_request import ChatRequest

        options = RequestOptions(namespace=namespace, cache_match=request.cache_match, lora=lora)
        if isinstance(request, ChatRequest):
            messages = [message.to_template() for message in request.messages]
            options = options.changed(template_kwargs=request.template_kwargs)
            return self._engine.chat(messages, params, options=options)
        options = options.changed(strip_suffix=request.strip_suffix)
        return self._engine.generate(request.one_prompt, params, options=options)

    def _script_reply(self, request: ChatRequest | CompletionRequest, reply: Reply | None) -> SamplingParams:
        """Return the request's sampling parameters.

        For a known reply they are greedy, and its ids are put into the runner's script, which the runner outputs.
        """
        defaults = dataclasses.replace(self._engine.default_params, temperature=0.0, max_tokens=self._max_tokens)
        if reply is None and self._generates:
            return request.sampling_params(defaults)
        ids = self._reply_ids(request, reply) or self._end
        self._runner.script.extend(ids)
        return dataclasses.replace(defaults, max_tokens=len(ids), repetition_penalty=1.0)

    def _reply_ids(self, request: ChatRequest | CompletionRequest, reply: Reply | None) -> tuple[int, ...]:
        """Return the ids of a known reply as the runner outputs them: its own, or those of its text and an end.

        For a completion they begin with the prompt's space, if that was stripped. None counts as an empty reply.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        from radixlm.runtime.chat.reply_start import given_reply
        from radixlm.runtime.server.openai.chat_request import ChatRequest

        tokenizer = self._engine.tokenizer
        if isinstance(reply, tuple):
            wrong = [token_id for token_id in reply if not 0 <= token_id < tokenizer.vocab_size]
            if wrong:
                raise ValueError(f"a reply has token id {wrong[0]}; the vocabulary is 0 to {tokenizer.vocab_size - 1}")
        if isinstance(request, ChatRequest):
            return reply if isinstance(reply, tuple) else (*tokenizer.encode(reply or "", add_bos=False), *self._end)
        prompt = self._engine.prompts.completion(request.one_prompt, strip_suffix=request.strip_suffix)
        if not isinstance(reply, tuple):
            sent = reply or ""  # with the prompt's final space, if that was stripped
            generated = f" {sent}" if sent and prompt.space_id is not None and not sent.startswith(" ") else sent
            reply = (*tokenizer.encode_inside(generated), *self._end)
        return given_reply(prompt, reply, tokenizer, self._end)
