"""Fields of a request that no endpoint acts on: which are ignored and listed back, and which are refused.

One table for all APIs. Knows names and values, not bodies: `unknown_fields.py` finds the fields in these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal
from urllib.parse import quote

from .errors import HTTPError

IGNORED_HEADER = "x-radixlm-ignored"
MAX_HEADER_LENGTH = 2048  # characters; proxies refuse answers with headers of some kilobytes
MAX_UNKNOWN = 64  # different fields of a body; each is compared with all that are known
MAX_EDITS = 2
_MIN_COMPARED = 5  # letters of a known name that others are compared with: too many are near a shorter one
_LONGEST = 64  # letters of a name that is compared with those that are known, all of which are shorter
_NEVER_IGNORED = ("cache_", "kv_")  # a mistyped cache_salt must not lose its isolation in silence
_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")  # between the words of a name
_RUNNER = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock")

HARMLESS: Mapping[str, str] = {
    "cache_control": "prefixes are cached without being marked",
    "cache_prompt": "what is cached does not change an answer",
    "prompt_cache_retention": "prefixes stay as long as there is room",
    "prompt_cache_options": "prefixes are cached without being marked",
    "user": "for the client's own books",
    "metadata": "for the client's own books",
    "client_metadata": "for the client's own books",
    "safety_identifier": "for the client's own books",
    "verbosity": "no model here knows it; ask for it in words",
    "user_profile_id": "for the client's own books",
    "workspace_id": "for the client's own books",
    "title": "for the client's own books",
    "diagnostics": "every answer says why no more was found in the cache",
    "context_management": "the whole history is read",
    "store": "only responses are kept",
    "service_tier": "all requests are served alike",
    "speed": "all requests are served alike",
    "priority": "all requests are served alike",
    "inference_geo": "requests are answered where the server is",
    "betas": "names features of other servers",
    "provider": "there is one model to choose from",
    "fallbacks": "there is one model to choose from",
    "route": "there is one model to choose from",
    "transforms": "asks for no change of the prompt that is made here",
    "usage": "usage is always counted",
    "timings_per_token": "adds figures to chunks elsewhere",
    "id_slot": "any request finds any prefix of its namespace",
    "n_keep": "the context is never shifted",
    "eager_input_streaming": "arguments are always streamed",
    "defer_loading": "every tool is shown at once",
    "caller": "tools are called by the model alone",
    "allowed_callers": "tools are called by the model alone",
    "citations": "no citations are made",
    "keep_alive": "the operator decides how long a model stays loaded",
    "num_keep": "the context is never shifted",
    "shift": "the context is never shifted",
    **dict.fromkeys(_RUNNER, "the operator decides how the model is run"),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "only a sampler reads it that is refused"),
}
"""Fields that an answer does not depend on, anywhere in a body: why none is lost by ignoring them."""


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer.

    Args:
        advice: what to do about it.
        neutral: values that ask for nothing.
        is_on: it is true where it is not sent, or may be: false asks for something.
    """

    advice: str
    neutral: tuple[object, ...] = ()
    is_on: bool = False

    def asks_for_nothing(self, value: object) -> bool:
        """Whether a field with this value may as well be left out."""
        return (asks_for_nothing(value) and not (self.is_on and value is False)) or value in self.neutral


_NO_SAMPLER = "there is no such sampler here: leave it out"
_OTHER_NAME = "this endpoint has another name for it, or none: see /openapi.json"

REFUSED: Mapping[str, Refused] = {
    **{name: Refused(_NO_SAMPLER, (0,)) for name in (
        "top_a", "mirostat", "dynatemp_range", "no_repeat_ngram_size",
    )},
    **{name: Refused(_NO_SAMPLER, (1,)) for name in (
        "typical_p", "typ_p", "typical", "tfs_z", "length_penalty",
    )},
    **{name: Refused(_NO_SAMPLER) for name in ("use_beam_search", "bad_words", "samplers", "logits_processors")},
    **{name: Refused(_OTHER_NAME) for name in (
        "messages", "prompt", "input", "system", "instructions", "tools", "tool_choice", "functions", "function_call",
        "max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_to_sample", "stop",
        "stop_sequences", "stop_regex", "stop_token_ids", "logit_bias",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "output_format",
        "json_schema", "grammar", "ignore_eos", "suffix", "echo", "truncation", "guided_choice", "guided_grammar",
        "guided_json", "guided_regex",
        "structured_outputs", "output_config", "text", "logprobs", "top_logprobs", "include", "return_token_ids",
        "strip_suffix", "prompt_logprobs", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking",
        "max_tool_calls", "banned_strings", "token_healing", "return_guesses",
    )},
    **{name: Refused(_OTHER_NAME, (-1,)) for name in ("max_new_tokens", "num_predict", "n_predict")},
    **{name: Refused(_OTHER_NAME, (1,)) for name in ("n", "best_of")},
    "repeat_penalty": Refused("send repetition_penalty", (1,)),
    "parallel_tool_calls": Refused(_OTHER_NAME, (True,)),
    "stream_options": Refused(
        "streams say here what they always say: leave it out", ({"include_usage": True}, {"include_usage": False})
    ),
    "modalities": Refused("models read and write text here: leave it out", (["text"],)),
    "extra_body": Refused("what a client puts in there belongs in the body itself: send its fields beside the others"),
    "options": Refused("send what is in there beside the others, in the body itself, by the names of /openapi.json"),
    "enable_thinking": Refused("this endpoint says it by thinking, or not at all: see /openapi.json", is_on=True),
    "think": Refused("send enable_thinking in chats and responses, thinking in messages", is_on=True),
    "thinking_budget": Refused("reasoning has no budget here: leave it out", (-1,)),
    "allowed_token_ids": Refused("send guided_choice or guided_regex"),
    "regex": Refused("send guided_regex, in chats and completions"),
    "ebnf": Refused("send guided_grammar, in chats and completions"),
    "structural_tag": Refused("send tools, or a schema for the reply"),
    "format": Refused("send response_format, or what this endpoint has instead"),
    "include_stop_str_in_output": Refused("a reply ends before what stops it, which stop_reason names: leave it out"),
    "skip_special_tokens": Refused("special tokens are in no text: ask for return_token_ids", (True,), is_on=True),
    "add_special_tokens": Refused(
        "a prompt begins as the model wants it: send token ids to /v1/completions", (True,), is_on=True
    ),
    "truncate_prompt_tokens": Refused('send {"truncation": "middle"}, or a shorter prompt'),
    "truncate": Refused('send {"truncation": "middle"}, or a shorter prompt'),
    "raw": Refused("send the prompt to /v1/completions or /api/generate"),
    "lora_path": Refused("there are no adapters here: leave it out"),
    "lora_request": Refused("there are no adapters here: leave it out"),
    "system_prompt": Refused("send it as a system message"),
    "assistant_prefill": Refused("the reply always begins anew: leave it out"),
    "num_ctx": Refused("the server's --context-length sets it: leave it out"),
    **{name: Refused("the model's own template is used: leave it out") for name in ("chat_template", "template")},
    "context": Refused("send the conversation as messages"),
    "penalize_newline": Refused(_NO_SAMPLER, (True,), is_on=True),
    "add_generation_prompt": Refused("the reply always begins anew: leave it out", (True,), is_on=True),
    "continue_final_message": Refused("the reply always begins anew: leave it out"),
    "prompt_embeds": Refused("models read and write text here: leave it out"),
    "audio": Refused("models read and write text here: leave it out"),
    "images": Refused("models read and write text here: leave it out"),
    "documents": Refused("send documents as text in a message"),
    "prediction": Refused("send what the reply may repeat in a message"),
    "mcp_servers": Refused("the server calls no other: give the model tools, and call them in the client"),
    "container": Refused("the server runs no code: give the model tools, and run them in the client"),
    "web_search_options": Refused("the server searches nothing: give the model a tool, and call it in the client"),
    "plugins": Refused("the server has none: leave it out"),
    "previous_response_id": Refused("/v1/responses has it; here, send the whole conversation"),
    "conversation": Refused("/v1/responses has it; here, send the whole conversation"),
    "thread": Refused("there are no threads here: send the whole conversation"),
    "background": Refused("wait for the answer, or stream it; /v1/batches answers many requests in the background"),
}  # fmt: skip
"""Fields of a body, not of what it holds, that some endpoint or another server has and this one has not.

A field that one endpoint acts on is refused by the others, never ignored."""

SPREAD = frozenset({"options"})
"""Objects whose fields mean what they would beside them: Ollama's bodies have parameters in one."""

SHAPING = frozenset({"response_format", "structured_outputs", "text", "output_config", "tool_choice"})
"""Fields that say what an answer is to be like: no field inside of them is ignored, but for harmless ones."""

_OFTEN_MISTYPED = tuple(name for name in REFUSED if len(name) > _MIN_COMPARED)

Verdict = Literal["harmless", "unknown", "empty"]
"""`empty`: it asks for nothing. The other two are listed back, and unknown fields are logged."""


def judge(path: str, value: object, known: Iterable[str]) -> Verdict:
    """What becomes of a field that is not among the `known` ones of its object.

    Args:
        path: the field's name behind those that lead to it, `messages.content.cache_control`.

    Raises:
        HTTPError: 400, it would change the answer, may be a mistyped field, or is about what is reused.

    >>> judge("tools.cache_control", {"type": "ephemeral"}, ["name"])
    'harmless'
    >>> judge("temprature", 1, ["temperature"])
    Traceback (most recent call last):
        ...
    radixlm.runtime.server.errors.HTTPError: unknown field `temprature`; did you mean `temperature`?
    """
    if value is None:  # first: a body may have any number of these, and to compare names takes a while
        return "empty"
    parent, _, name = path.rpartition(".")
    name = _in_snake_case(name)
    if name in HARMLESS:
        return "empty" if asks_for_nothing(value) else "harmless"
    refused = REFUSED.get(name) if not parent or parent in SPREAD else None
    if refused is not None:
        if refused.asks_for_nothing(value):
            return "empty"
        raise HTTPError(400, f"{path} would change the answer, and is not known here; {refused.advice}", param=path)
    if parent.split(".")[0] in SHAPING and not asks_for_nothing(value):
        raise HTTPError(400, f"unknown field `{path}`; it would change the answer: leave it out", param=path)
    if name.startswith(_NEVER_IGNORED):
        message = f"unknown field `{path}`; what is about the cache is never ignored: send a name in /openapi.json"
        raise HTTPError(400, message, param=path)
    near = _near(name, tuple(sorted(known)))
    if near is not None:
        raise HTTPError(400, f"unknown field `{path}`; did you mean `{near}`?", param=path)
    near = None if parent else _near(name, _OFTEN_MISTYPED)
    if near is not None:
        raise HTTPError(
            400, f"unknown field `{path}`; of `{near}`, if that is meant: {REFUSED[near].advice}", param=path
        )
    return "unknown"


@dataclass
class IgnoredFields:
    """Names of fields that nothing is done with, each behind those that lead to it: `tools.cache_control`."""

    harmless: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """All of them."""
        return self.harmless | self.unknown

    def ignore(self, path: str, value: object, known: Iterable[str]) -> None:
        """Note a field that is left out, and that is not among the `known` ones of its object.

        Raises:
            HTTPError: 400, `judge` refuses it, or there are too many that are unknown.
        """
        if path in self.unknown:
            return
        verdict = judge(path, value, known)
        if verdict == "harmless":
            self.harmless.add(path)
        elif verdict == "unknown":
            self.unknown.add(path)
            if len(self.unknown) > MAX_UNKNOWN:
                message = f"the body has more than {MAX_UNKNOWN} unknown fields; send those that /openapi.json has"
                raise HTTPError(400, message)


def asks_for_nothing(value: object) -> bool:
    """Whether a field with this value may as well be left out."""
    return value is None or value is False or value in ("", [], {})


def is_near(name: str, other: str) -> bool:
    """Whether at most two letters must be put in, left out or changed to make one name the other.

    >>> is_near("cache_slat", "cache_salt"), is_near("stream", "seed")
    (True, False)
    """
    if abs(len(name) - len(other)) > MAX_EDITS or len(_letters(name) - _letters(other)) > MAX_EDITS:
        return False
    far = MAX_EDITS + 1
    row = dict(enumerate(range(far)))  # edits from the name's beginning so far to the beginnings of the other near it
    for place, letter in enumerate(name, start=1):
        before, row = row, {}
        for at in range(max(place - MAX_EDITS, 0), min(place + MAX_EDITS, len(other)) + 1):
            changed = before.get(at - 1, far) + (letter != other[at - 1]) if at else far
            row[at] = min(before.get(at, far) + 1, row.get(at - 1, far) + 1, changed)
        if min(row.values()) > MAX_EDITS:
            return False
    return row[len(other)] <= MAX_EDITS


@lru_cache(maxsize=1024)
def _letters(name: str) -> frozenset[str]:
    return frozenset(name)


@lru_cache(maxsize=1024)
def _near(name: str, known: tuple[str, ...]) -> str | None:
    """The first of the known names that one is near; most are told by their letters alone."""
    if len(name) > _LONGEST:
        return None
    return next((each for each in known if len(each) >= _MIN_COMPARED and is_near(name, each)), None)


def _in_snake_case(name: str) -> str:
    """A name as fields are written here.

    >>> [_in_snake_case(name) for name in ("cacheSalt", "cache-salt", "CACHE_SALT")]
    ['cache_salt', 'cache_salt', 'cache_salt']
    """
    return _BORDER.sub("_", name).lower()


def ignored_header(names: Iterable[str]) -> str:
    """The value of the header that lists ignored fields: sorted, in ASCII, and cut where it gets too long.

    >>> ignored_header({"user", "tools.cache_control", "a,b"})
    'a%2Cb, tools.cache_control, user'
    """
    text = ", ".join(quote(name[:200]) for name in sorted(names))
    return text if len(text) <= MAX_HEADER_LENGTH else text[:MAX_HEADER_LENGTH].rpartition(", ")[0] + ", ..."
