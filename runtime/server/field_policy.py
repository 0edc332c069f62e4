"""The policy for unsupported fields of a request: which are ignored and listed in a header, and which are refused.

One table for all APIs. Knows names and values, not bodies: `unknown_fields.py` finds the fields in a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal
from urllib.parse import quote

from .errors import HTTPError
from .hints.field_names import DISTINCT, synonym_advice

IGNORED_HEADER = "x-radixlm-ignored"
MAX_HEADER_LENGTH = 2048  # characters; proxies refuse responses with headers of several kilobytes
MAX_UNKNOWN = 64  # different fields in one body; each is compared with all known names
MAX_EDITS = 2
_MIN_COMPARED = 5  # minimum letters of a known name to suggest: too many names are near a shorter one
_LONGEST = 64  # longer names are near no known name
_NEVER_IGNORED = ("cache_", "kv_")  # a mistyped cache_salt must not silently lose its isolation
_BORDER = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])")  # between the words of a name
_RUNNER = ("num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock")

HARMLESS: Mapping[str, str] = {
    "cache_control": "prefixes are cached without being marked",
    "cache_prompt": "the cache is on by default; cache_match chooses what is reused",
    "prompt_cache_retention": "prefixes stay cached as long as there is room",
    "prompt_cache_options": "prefixes are cached without being marked",
    "user": "for the client's own records",
    "metadata": "for the client's own records",
    "client_metadata": "for the client's own records",
    "safety_identifier": "for the client's own records",
    "verbosity": "local models do not support it; ask for it in the prompt",
    "user_profile_id": "for the client's own records",
    "workspace_id": "for the client's own records",
    "title": "for the client's own records",
    "diagnostics": "every reply has why_not_more",
    "context_management": "the whole history is read",
    "store": "only responses are stored",
    "service_tier": "all requests are served alike",
    "speed": "all requests are served alike",
    "priority": "all requests are served alike",
    "inference_geo": "requests are processed where the server runs",
    "betas": "names features of other servers",
    "provider": "there is one model to choose from",
    "fallbacks": "there is one model to choose from",
    "route": "there is one model to choose from",
    "transforms": "this server does not transform prompts",
    "usage": "usage is always returned",
    "timings_per_token": "chunks have no timings",
    "id_slot": "every request can use every prefix of its namespace",
    "n_keep": "the context is never shifted",
    "eager_input_streaming": "arguments are always streamed",
    "defer_loading": "every tool is shown at once",
    "caller": "only the model calls tools",
    "allowed_callers": "only the model calls tools",
    "citations": "replies have no citations",
    "keep_alive": "only Ollama's API has it, of a server with several models",
    "num_keep": "the context is never shifted",
    "shift": "the context is never shifted",
    **dict.fromkeys(_RUNNER, "the operator decides how the model is run"),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), "only mirostat uses it, which is refused"),
}
"""Fields that do not change a reply, anywhere in a body, each with the reason why it can be ignored."""


@dataclass(frozen=True)
class Refused:
    """An unsupported field that would change the reply.

    Args:
        advice: what the client should do instead.
        neutral: values with no effect, which are accepted.
        is_on: the field's default is true, so that false has an effect.
    """

    advice: str
    neutral: tuple[object, ...] = ()
    is_on: bool = False

    def asks_for_nothing(self, value: object) -> bool:
        """Return whether this value has no effect, so that the field can be left out."""
        return (asks_for_nothing(value) and not (self.is_on and value is False)) or value in self.neutral


_NO_SAMPLER = "remove it: this server has no such sampler"
_OTHER_NAME = "see /openapi.json for the name that this endpoint uses, if it has one"

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
        "remove it: this endpoint's streams are always the same", ({"include_usage": True}, {"include_usage": False})
    ),
    "modalities": Refused("remove it: models read and write text only", (["text"],)),
    "extra_body": Refused("move its fields into the body itself"),
    "options": Refused("move its fields into the body itself, with the names in /openapi.json"),
    "enable_thinking": Refused("see /openapi.json: this endpoint uses thinking, or has no such switch", is_on=True),
    "think": Refused("send enable_thinking in chats and responses, thinking in messages", is_on=True),
    "thinking_budget": Refused("remove it: reasoning has no budget", (-1,)),
    "allowed_token_ids": Refused("send guided_choice or guided_regex"),
    "regex": Refused("send guided_regex, in chats and completions"),
    "ebnf": Refused("send guided_grammar, in chats and completions"),
    "structural_tag": Refused("send tools, or a schema for the reply"),
    "format": Refused("send response_format, or this endpoint's equivalent"),
    "include_stop_str_in_output": Refused("remove it: a reply ends before the stop string, which stop_reason has"),
    "skip_special_tokens": Refused("text never has special tokens: send return_token_ids", (True,), is_on=True),
    "add_special_tokens": Refused(
        "special tokens are added as the model requires: send token ids to /v1/completions instead", (True,), is_on=True
    ),
    "truncate_prompt_tokens": Refused('send {"truncation": "middle"}, or a shorter prompt'),
    "truncate": Refused('send {"truncation": "middle"}, or a shorter prompt'),
    "raw": Refused("send the prompt to /v1/completions or /api/generate"),
    "lora_path": Refused("name an adapter of the server in model: MODEL:ADAPTER"),
    "lora_request": Refused("name an adapter of the server in model: MODEL:ADAPTER"),
    "system_prompt": Refused("send it as a system message"),
    "assistant_prefill": Refused("remove it: replies always start from the beginning"),
    "num_ctx": Refused("remove it: the server's --context-length sets it"),
    **{name: Refused("remove it: the model's own chat template is used") for name in ("chat_template", "template")},
    "context": Refused("send the conversation as messages"),
    "penalize_newline": Refused(_NO_SAMPLER, (True,), is_on=True),
    "add_generation_prompt": Refused("remove it: replies always start from the beginning", (True,), is_on=True),
    "continue_final_message": Refused("remove it: replies always start from the beginning"),
    "prompt_embeds": Refused("remove it: models read and write text only"),
    "audio": Refused("remove it: models read and write text only"),
    "images": Refused("remove it: models read and write text only"),
    "documents": Refused("send documents as text in a message"),
    "prediction": Refused("send the predicted text in a message"),
    "mcp_servers": Refused("the server calls no MCP servers: declare tools, and call them in the client"),
    "container": Refused("the server runs no code: declare tools, and run them in the client"),
    "web_search_options": Refused("the server does not search: declare a tool, and call it in the client"),
    "plugins": Refused("remove it: the server has no plugins"),
    "previous_response_id": Refused("only /v1/responses has it: send the whole conversation"),
    "conversation": Refused("only /v1/responses has it: send the whole conversation"),
    "thread": Refused("the server has no threads: send the whole conversation"),
    "background": Refused("wait for the reply, or stream it; /v1/batches processes requests in the background"),
}  # fmt: skip
"""Top-level fields that an endpoint does not support, but another endpoint or server does.

A field that one endpoint supports is refused by the others, never ignored."""

SPREAD = frozenset({"options"})
"""Objects whose fields count as top-level ones: Ollama's bodies have parameters in `options`."""

SHAPING = frozenset({"response_format", "structured_outputs", "text", "output_config", "tool_choice"})
"""Fields that shape the reply: unknown fields inside them are refused, unless they are harmless."""

_OFTEN_MISTYPED = tuple(name for name in REFUSED if len(name) > _MIN_COMPARED)

Verdict = Literal["harmless", "unknown", "empty"]
"""`empty`: the value has no effect. The other two are listed in the header, and unknown fields are logged."""


def judge(path: str, value: object, known: Iterable[str]) -> Verdict:
    """Return the verdict on a field that is not among the `known` ones of its object.

    Args:
        path: the field's name with the objects around it, `messages.content.cache_control`.

    Raises:
        HTTPError: 400 if it would change the reply, may be a mistyped known field, or concerns the cache.

    >>> judge("tools.cache_control", {"type": "ephemeral"}, ["name"])
    'harmless'
    >>> judge("temprature", 1, ["temperature"])
    Traceback (most recent call last):
        ...
    radixlm.runtime.server.errors.HTTPError: unknown field `temprature`; did you mean `temperature`?
    """
    if value is None:  # first: a body may have any number of these, and comparing names takes a while
        return "empty"
    parent, _, name = path.rpartition(".")
    name = _in_snake_case(name)
    if name in HARMLESS:
        return "empty" if asks_for_nothing(value) else "harmless"
    refused = REFUSED.get(name) if not parent or parent in SPREAD else None
    if refused is not None:
        if refused.asks_for_nothing(value):
            return "empty"
        raise HTTPError(400, f"unsupported field `{path}`; {advice_on(name, known)}", param=path)
    if parent.split(".")[0] in SHAPING and not asks_for_nothing(value):
        raise HTTPError(400, f"unknown field `{path}`; remove it, because it would change the reply", param=path)
    if name.startswith(_NEVER_IGNORED):
        message = f"unknown field `{path}`; fields of the cache are never ignored: use a name from /openapi.json"
        raise HTTPError(400, message, param=path)
    is_distinct = not parent and name in DISTINCT
    near = None if is_distinct else _near(name, tuple(sorted(known)))
    advice = None if parent else synonym_advice(name, frozenset(known))
    if advice is not None and (near or _near(name, _OFTEN_MISTYPED)) is not None:
        raise HTTPError(400, f"unknown field `{path}`; {advice}", param=path)
    if near is not None:
        raise HTTPError(400, f"unknown field `{path}`; did you mean `{near}`?", param=path)
    near = None if parent or is_distinct else _near(name, _OFTEN_MISTYPED)
    if near is not None:
        raise HTTPError(400, f"unknown field `{path}`; if you mean `{near}`: {advice_on(near, known)}", param=path)
    return "unknown"


def advice_on(name: str, known: Iterable[str]) -> str:
    """Return what to do instead of sending a refused field to an endpoint with the `known` fields."""
    advice = REFUSED[name].advice
    return (synonym_advice(name, frozenset(known)) or advice) if advice == _OTHER_NAME else advice


@dataclass
class IgnoredFields:
    """The ignored fields of one request, each with the objects around it: `tools.cache_control`."""

    harmless: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """All ignored fields."""
        return self.harmless | self.unknown

    def ignore(self, path: str, value: object, known: Iterable[str]) -> None:
        """Add a field that is not among the `known` ones of its object, unless its value has no effect.

        Raises:
            HTTPError: 400 if `judge` refuses it, or if there are more than `MAX_UNKNOWN` unknown fields.
        """
        if path in self.unknown:
            return
        verdict = judge(path, value, known)
        if verdict == "harmless":
            self.harmless.add(path)
        elif verdict == "unknown":
            self.unknown.add(path)
            if len(self.unknown) > MAX_UNKNOWN:
                message = f"the body has more than {MAX_UNKNOWN} unknown fields; use those in /openapi.json"
                raise HTTPError(400, message)


def asks_for_nothing(value: object) -> bool:
    """Return whether a value of any field has no effect, such as None, false or an empty list."""
    return value is None or value is False or value in ("", [], {})


def is_near(name: str, other: str) -> bool:
    """Return whether two names are at most `MAX_EDITS` inserted, deleted or changed letters apart.

    >>> is_near("cache_slat", "cache_salt"), is_near("stream", "seed")
    (True, False)
    """
    if abs(len(name) - len(other)) > MAX_EDITS or len(_letters(name) - _letters(other)) > MAX_EDITS:
        return False
    far = MAX_EDITS + 1
    row = dict(enumerate(range(far)))  # edits from the prefix of `name` to the prefixes of `other` of about its length
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
    """Return the first known name that is near this one, or None."""
    if len(name) > _LONGEST:
        return None
    return next((each for each in known if len(each) >= _MIN_COMPARED and is_near(name, each)), None)


def _in_snake_case(name: str) -> str:
    """Return a name in snake case.

    >>> [_in_snake_case(name) for name in ("cacheSalt", "cache-salt", "CACHE_SALT")]
    ['cache_salt', 'cache_salt', 'cache_salt']
    """
    return _BORDER.sub("_", name).lower()


def ignored_header(names: Iterable[str]) -> str:
    """Return the value of the header that lists ignored fields: sorted, in ASCII, cut at `MAX_HEADER_LENGTH`.

    >>> ignored_header({"user", "tools.cache_control", "a,b"})
    'a%2Cb, tools.cache_control, user'
    """
    text = ", ".join(quote(name[:200]) for name in sorted(names))
    return text if len(text) <= MAX_HEADER_LENGTH else text[:MAX_HEADER_LENGTH].rpartition(", ")[0] + ", ..."
