"""Compare replies that were computed under load with those of an engine that has nothing else to do.

Compares ids, text, logprobs and finish reasons, all to the last bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixlm.runtime.cache.cache_namespace import CacheScope
from radixlm.runtime.engine.engine import Engine

from .replies import Reply
from .requests import Ask


@dataclass(frozen=True)
class Survivor:
    """A reply, the ids that it was computed from, and the requested fields of `SamplingParams`."""

    kind: str
    params: Mapping[str, Any]
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str

    @classmethod
    def of(cls, ask: Ask, reply: Reply) -> Survivor:
        """Return the record of a complete reply under load. The seed of a choice is the request's plus its index."""
        assert reply.finish_reason is not None
        ids = reply.prompt_token_ids, reply.token_ids
        params = dict(ask.params)
        if "seed" in params:
            params["seed"] += reply.index
        return cls(ask.kind, params, *ids, reply.text, reply.logprobs, reply.finish_reason)

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Survivor:
        """Return a survivor from JSON; token ids of a logit bias, which are texts there, become numbers again."""
        params = dict(fields["params"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
        return cls(**{**fields, "params": params})


def differences(survivor: Survivor, engine: Engine) -> list[str]:
    """Compute a survivor's reply again, alone and with nothing cached; return what differs."""
    params = dataclasses.replace(engine.default_params, **survivor.params)
    namespace = engine.namespaces.of(CacheScope(cache_salt="alone"))
    alone = engine.generate(survivor.prompt_token_ids, params, cache_match="exact", namespace=namespace)
    engine.clear_cache(namespace)
    assert alone.usage.cached_tokens == 0
    pairs = (
        ("token_ids", survivor.token_ids, list(alone.token_ids)),
        ("text", survivor.text, alone.text),
        ("logprobs", survivor.logprobs, [item.logprob for item in alone.logprobs or ()]),
        ("finish_reason", survivor.finish_reason, alone.finish_reason),
    )
    counts = f"{len(survivor.prompt_token_ids)} + {len(survivor.token_ids)} tokens"
    return [
        f"{survivor.kind} {survivor.params}, {counts}: {name} is {ours!r:.200}, alone {theirs!r:.200}"
        for name, ours, theirs in pairs
        if ours != theirs
    ]
