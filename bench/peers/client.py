"""One client for all engines: streamed requests of token ids over HTTP, and the time of each token of a reply.

Knows two APIs, OpenAI's completions and llama.cpp's own; not what is measured.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..served import Client, Event, Json

Ids = Sequence[int]


@dataclass(frozen=True)
class Reply:
    """Times in seconds of `time.perf_counter`; ids if the server reports them."""

    sent_at: float
    times: list[float]  # of each token
    token_ids: list[int]
    text: str
    num_prompt_tokens: int | None = None  # if the server reports it

    @property
    def to_first_s(self) -> float:
        """The seconds from sending the request to its first token."""
        return self.times[0] - self.sent_at


class EngineClient(ABC):
    """Sends requests to the server on `port`, over one kept connection for each stream."""

    path: str

    def __init__(self, port: int) -> None:
        self._port = port
        self._clients: list[Client] = []

    @abstractmethod
    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """Return a streamed greedy request for exactly `num_tokens` tokens."""

    @abstractmethod
    def reply(self, sent_at: float, events: Sequence[Event]) -> Reply:
        """Return the reply in the events of a stream."""

    def ids_of(self, reply: Reply) -> list[int]:
        """Return the tokens of a reply, as the next turn of a chat has them."""
        return reply.token_ids

    def ask(self, prompt: Ids, num_tokens: int) -> Reply:
        """Return the reply to one prompt; raises like `ask_all`."""
        return self.ask_all([prompt], num_tokens)[0]

    def ask_all(self, prompts: Sequence[Ids], num_tokens: int) -> list[Reply]:
        """Return the replies to prompts that are sent at once.

        Raises:
            ValueError: a reply has another number of tokens than `num_tokens`, or its prompt has other tokens.
        """
        self._clients += [Client(self._port) for _ in range(len(prompts) - len(self._clients))]
        bodies = [self.body(prompt, num_tokens) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as threads:
            replies = list(threads.map(self._ask, self._clients, bodies))
        lengths = {len(reply.times) for reply in replies}
        if lengths != {num_tokens}:
            raise ValueError(f"replies have {sorted(lengths)} tokens, {num_tokens} were asked for")
        for prompt, reply in zip(prompts, replies, strict=True):
            if reply.num_prompt_tokens not in (None, len(prompt)):
                raise ValueError(f"the server counts {reply.num_prompt_tokens} tokens in a prompt of {len(prompt)}")
        return replies

    def _ask(self, client: Client, body: Json) -> Reply:
        sent_at = time.perf_counter()
        return self.reply(sent_at, client.events(self.path, body))


class CompletionsClient(EngineClient):
    """`/v1/completions` with vLLM's `return_token_ids`: radixlm, vLLM, and the HTTP server for OpenVINO."""

    path = "/v1/completions"

    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """Return a request of `/v1/completions` that returns token ids."""
        fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
        return {"prompt": list(prompt), "max_tokens": num_tokens, **fixed}

    def reply(self, sent_at: float, events: Sequence[Event]) -> Reply:
        """Return the reply in the events of a stream, with the ids that the server reports."""
        came = [(event.at, choice) for event in events for choice in event.data["choices"]]
        ids = [(at, token_id) for at, choice in came for token_id in choice.get("token_ids") or ()]
        text = "".join(choice.get("text", "") for _, choice in came)
        return Reply(sent_at, [at for at, _ in ids], [token_id for _, token_id in ids], text)


class TextClient(EngineClient):
    """`/v1/completions` of a server that takes no ids, dasLLAMA's: a prompt is as many words of one token each."""

    path = "/v1/completions"

    def __init__(self, port: int, words: Sequence[str]) -> None:
        super().__init__(port)
        self._words = words

    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """Return a request whose prompt is a text of as many tokens, because the server takes no ids."""
        text = "".join(self._words[token_id % len(self._words)] for token_id in prompt)
        fixed = {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        return {"prompt": text, "max_tokens": num_tokens, **fixed}

    def reply(self, sent_at: float, events: Sequence[Event]) -> Reply:
        """Return the reply in the events of a stream, without ids.

        A token that ends within a character counts with the next, or with the end.
        """
        *_, usage = (event.data["usage"] for event in events if event.data.get("usage"))
        texts = [(event.at, choice["text"]) for event in events for choice in event.data["choices"]]
        times = [at for at, text in texts if text]
        times += [texts[-1][0]] * (usage["completion_tokens"] - len(times))
        return Reply(sent_at, times, [], "".join(text for _, text in texts), usage["prompt_tokens"])


class LlamaCppClient(EngineClient):
    """`/completion` of llama.cpp and ik_llama.cpp. A token that ends within a character has no event of its own: it
    counts with the next one. ik_llama.cpp reports no ids, and its `ignore_eos` knows one end token of several, so the
    `banned` ids are those that it may never generate.
    """

    path = "/completion"

    def __init__(self, port: int, banned: Sequence[int] = ()) -> None:
        super().__init__(port)
        self._bias = {"logit_bias": [[token_id, False] for token_id in banned]} if banned else {}

    def body(self, prompt: Ids, num_tokens: int) -> Json:
        """Return a request of llama.cpp's `/completion`."""
        fixed = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True, "stream": True}
        return {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "return_tokens": True,
            "cache_prompt": True,
            **fixed,
            **self._bias,
        }

    def reply(self, sent_at: float, events: Sequence[Event]) -> Reply:
        """Return the reply in the events of a stream, with the ids that the server reports, if any."""
        times: list[float] = []
        ids: list[int] = []
        for event in events:
            is_last = bool(event.data["stop"])
            count = event.data.get("tokens_predicted", len(times) + 1)
            times += [event.at] * (int(count) - len(times))
            ids += () if is_last else event.data.get("tokens", ())
        return Reply(sent_at, times, ids, "".join(event.data["content"] for event in events))

    def ids_of(self, reply: Reply) -> list[int]:
        """Return the tokens of a reply; if the server has not reported all of them, it tokenizes the text."""
        if len(reply.token_ids) == len(reply.times):
            return reply.token_ids
        answer = Client(self._port).json("POST", "/tokenize", {"content": reply.text})  # that of a stream is closed
        return [int(token_id) for token_id in answer["tokens"]]
