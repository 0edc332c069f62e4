"""Make the requests of a stream of the load test: random prompts, lengths, sampling, endings, and bad requests.

Everything depends only on the seed and on the replies. Knows OpenAI's bodies; not sockets, nor what a model generates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..connection import Call

API_KEYS = ("key of the first", "key of the second", "key of the third")
MAX_BODY_BYTES = 1 << 20  # of the server under test
JSON_SHARE, CHOICES_SHARE = 0.05, 0.05
MOST_TOKENS_LOG2 = 8  # of a reply, 46 on average
Ending = Literal["read", "leave before the first token", "leave in mid-stream", "leave in mid-request"]
_COMMON = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
_ODD = ("naïve", "Größe", "価格", "кот", "🙂", "3.14", "x_1 = f(y)", "\n", "—", "<|im_end|>")
_WORDS = (*_COMMON.split(), *_ODD)
_SYSTEM_WORDS = (12, 40, 80, 160)  # at most, of the prefixes that many requests share


@dataclass(frozen=True)
class Facts:
    """The facts that clients know of the server."""

    model_id: str
    context_length: int  # tokens
    vocab_size: int
    is_chat: bool  # whether it has a chat template


@dataclass(frozen=True)
class Ask:
    """One request, how the client ends it, and the response that it must get.

    `params` are the fields of `SamplingParams` that it sets; with them and the ids that were used, an engine can
    compute the same again, unless `is_repeatable` is False.
    """

    kind: str
    call: Call
    statuses: frozenset[int]
    ending: Ending = "read"
    is_stream: bool = False
    is_repeatable: bool = False
    is_json: bool = False  # whether the reply must be a JSON object, if it is complete
    num_choices: int = 1
    num_events: int = 0  # to be read before a client disconnects in mid-stream
    params: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, str]] = ()  # of a chat, to be continued

    @property
    def is_good(self) -> bool:
        """Return whether the request should succeed."""
        return 200 in self.statuses


class Stream:
    """One of many clients: makes its next request, and is given the reply to the last."""

    def __init__(self, number: int, seed: int, facts: Facts, bad_share: float = 0.15) -> None:
        self._random = random.Random(f"{seed}/{number}")
        self._facts = facts
        self._bad_share = bad_share
        self._key = API_KEYS[number % len(API_KEYS)]
        shared = random.Random(seed)
        self._systems = [self._text(shared, count) for count in _SYSTEM_WORDS]
        self._messages: list[Mapping[str, str]] = []
        self._num_tokens = 0  # of the conversation so far

    def next(self) -> Ask:
        """Return a random next request: a chat, a completion, one that fills the context, or an invalid one."""
        if self._random.random() < self._bad_share:
            return self._make_bad()
        if self._random.random() < 0.01:
            return self._make_context_filler()
        if not self._facts.is_chat or self._random.random() < 0.3:
            return self._make_completion()
        return self._make_chat()

    def add_reply(self, ask: Ask, text: str, num_tokens: int) -> None:
        """Continue the conversation with the reply to a chat.

        Args:
            num_tokens: length of the conversation with the reply; a long one is not continued.
        """
        if ask.messages:
            self._messages = [*ask.messages, {"role": "assistant", "content": text}]
            self._num_tokens = num_tokens

    def think_s(self) -> float:
        """Return the seconds until the next request, mostly zero."""
        return self._random.choice((0.0, 0.0, 0.0, self._random.random()))

    def _make_chat(self) -> Ask:
        """Make the conversation's next turn, or begin another, with a system prompt that others may share."""
        rng = self._random
        kind = "chat, next turn"
        messages = list(self._messages)
        if not messages or rng.random() < 0.3 or self._num_tokens > self._facts.context_length // 2:
            is_shared = rng.random() < 0.7
            kind = "chat, shared prefix" if is_shared else "chat, fresh prefix"
            system = rng.choice(self._systems) if is_shared else self._text(rng, 40)
            messages = [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": self._text(rng, 60)})
        self._messages = []
        return self._make_ask(kind, "/v1/chat/completions", {"messages": messages}, tuple(messages))

    def _make_completion(self) -> Ask:
        """Make a request for a completion: of random ids, or of a text with or without a shared beginning."""
        rng = self._random
        kind = rng.choice(("text, shared prefix", "text, fresh prefix", "ids"))
        if kind == "ids":
            count = min(int(2 ** rng.uniform(0, 9)), self._facts.context_length // 2)
            prompt: str | list[int] = self._ids(count)
        else:
            prompt = (rng.choice(self._systems) + " " if "shared" in kind else "") + self._text(rng, 100)
        # Survivors are computed again from ids alone, without what constrains the first token after a stripped space.
        return self._make_ask(kind, "/v1/completions", {"prompt": prompt, "strip_suffix": False})

    def _make_context_filler(self) -> Ask:
        """Make a prompt that leaves room for a few tokens only, and requests more."""
        room = self._random.randrange(1, 8)
        body = {"prompt": self._ids(self._facts.context_length - room), "max_tokens": room + 40}
        return self._make_ask("fills the context", "/v1/completions", body)

    def _make_ask(
        self, kind: str, path: str, body: dict[str, Any], messages: tuple[Mapping[str, str], ...] = ()
    ) -> Ask:
        """Make a valid request with random sampling, streaming, choices and ending (read, or disconnect early).

        Args:
            kind: name of its kind, in the results.
            body: its prompt.
            messages: the messages of a chat.
        """
        rng = self._random
        is_json = bool(messages) and rng.random() < JSON_SHARE
        num_choices = 1 if rng.random() > CHOICES_SHARE else rng.randrange(2, 4)
        params: dict[str, Any] = {"max_tokens": int(2 ** rng.uniform(0, MOST_TOKENS_LOG2)), "temperature": 1.0}
        if not is_json:
            params |= self._draw_sampling()
        params |= {key: body[key] for key in params.keys() & body.keys()}
        is_stream = rng.random() < 0.6
        wishes: dict[str, Any] = dict(params) | ({"n": num_choices} if num_choices > 1 else {})
        if is_json:
            kind, wishes["response_format"] = "chat, JSON", {"type": "json_object"}
        if num_choices > 1:
            kind = f"{kind.partition(',')[0]}, several choices"
        if messages and "logprobs" in params:
            wishes |= {"logprobs": True, "top_logprobs": params["logprobs"]}
        if is_stream:
            wishes |= {"stream": True, "stream_options": {"include_usage": True}}
        ending: Ending = "read"
        if rng.random() < 0.15:
            endings: list[Ending] = ["leave before the first token", "leave in mid-request"]
            ending = rng.choice([*endings, *(["leave in mid-stream"] * 4 if is_stream else [])])  # type: ignore[list-item]
        return Ask(
            kind,
            self._call(path, {**body, **wishes, "model": self._facts.model_id, "return_token_ids": True}),
            frozenset({200}),
            ending,
            is_stream,
            is_repeatable=params["temperature"] == 0.0 or "seed" in params,
            is_json=is_json,
            num_choices=num_choices,
            num_events=rng.randrange(1, 12),
            params=params,
            messages=messages,
        )

    def _draw_sampling(self) -> dict[str, Any]:
        """Draw random sampling parameters; most requests with a temperature have a seed."""
        rng = self._random
        params: dict[str, Any] = {"temperature": rng.choice((0.0, 0.0, 0.3, 1.0, 1.5))}
        if params["temperature"] and rng.random() < 0.9:
            params["seed"] = rng.randrange(2**63)
        for share, name, value in (
            (0.3, "top_p", rng.choice((0.5, 0.9, 0.99))),
            (0.2, "top_k", rng.choice((1, 5, 50))),
            (0.2, "min_p", 0.05),
            (0.2, "repetition_penalty", 1.2),
            (0.15, "presence_penalty", 0.7),
            (0.15, "frequency_penalty", 0.4),
            (0.2, "stop", rng.sample([" the", "\n", ".", "a", " of the"], k=2)),
            (0.15, "logprobs", rng.randrange(5)),
            (0.3, "ignore_eos", True),
            (0.1, "logit_bias", {rng.randrange(self._facts.vocab_size): rng.choice((-100.0, 5.0))}),
        ):
            if rng.random() < share:
                params[name] = value
        return params

    def _make_bad(self) -> Ask:
        """Make a request that the server must refuse, with the status that it must answer."""
        rng, facts = self._random, self._facts
        good: dict[str, Any] = {"prompt": "Hello", "max_tokens": 4}
        path, chat = "/v1/completions", "/v1/chat/completions"
        messages = rng.choice([{}, 5, [1], [{"role": "nobody", "content": "x"}]])
        others: tuple[tuple[str, int, Callable[[], Call]], ...] = (
            ("not JSON", 400, lambda: self._call(path, rng.randbytes(40).replace(b"{", b"") + b"\xff")),
            ("not UTF-8", 400, lambda: self._call(path, b'{"prompt": "\xc3\x28"}')),
            ("wrong type", 400, lambda: self._call(chat, {"messages": messages})),
            ("field", 400, lambda: self._call(path, good | {"temprature": 1})),
            ("no key", 401, lambda: Call("POST", path, json.dumps(good).encode())),
            ("wrong key", 401, lambda: Call("POST", path, json.dumps(good).encode(), {"authorization": "Bearer no"})),
        )
        rare: tuple[tuple[str, int, Callable[[], Call]], ...] = (
            ("no room for a reply", 400, lambda: self._call(path, {"prompt": self._ids(facts.context_length)})),
            ("no such model", 404, lambda: self._call(path, good | {"model": "unknown"})),
            ("no such path", 404, lambda: self._call("/v1/nothing", good)),
            ("wrong method", 405, lambda: Call("GET", path, headers=self._headers())),
            ("body too large", 413, lambda: self._call(path, b" " * (MAX_BODY_BYTES + 1))),
        )
        kind = rng.choice([*_BAD_FIELDS, *(name for name, _, _ in others), ""])
        if kind in _BAD_FIELDS:
            status, call = 400, self._call(path, {**good, **_BAD_FIELDS[kind]})
        else:
            kind, status, make = next((one for one in others if one[0] == kind), None) or rng.choice(rare)
            call = make()
        return Ask(f"bad: {kind}", call, frozenset({status}))

    def _call(self, path: str, body: Mapping[str, Any] | bytes) -> Call:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Call("POST", path, content, self._headers())

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"}

    def _text(self, rng: random.Random, most_words: int) -> str:
        """Return some words, of a quarter of the context at most: a token has a byte or more."""
        text = " ".join(rng.choices(_WORDS, k=rng.randrange(1, most_words + 1)))
        return text.encode()[: self._facts.context_length // 4].decode(errors="ignore")

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(self._facts.vocab_size) for _ in range(count)]


_BAD_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "empty prompt": {"prompt": ""},
    "unknown id": {"prompt": [10**6]},
    "negative id": {"prompt": [-1]},
    "huge id": {"prompt": [10**30]},
    "temperature": {"temperature": -1},
    "no tokens": {"max_tokens": -2},
    "top_p": {"top_p": 1.5},
    "many choices": {"n": 10**9},
    "seed": {"seed": 2**70},
    "stop": {"stop": ["x" * 5000]},
    "cache match": {"cache_match": "similar"},
    "salt": {"cache_salt": "x" * 5000},
    "lone surrogate": {"cache_salt": "\ud800"},
    "stream options": {"stream_options": {"include_usage": True}},
}
