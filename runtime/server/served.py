"""What every endpoint serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec
from radixlm.tokenizer_fix import TokenizerError
from starlette.requests import Request
from starlette.responses import Response

from ..cache.cache_namespace import CacheScope
from ..engine.completion import Completion
from .errors import HTTPError
from .http.api_keys import api_key_of
from .http.request_body import read_json
from .lanes import Lanes
from .openai.replies import UsageReply
from .openai.usage import usage_of
from .request_log import record_of
from .truncation import Truncation

if TYPE_CHECKING:
    from ..engine.engine import Engine

T = TypeVar("T")

KEEP_ALIVE_S = 15.0  # proxies close what was silent for a minute, some for half of one


@dataclass(frozen=True)
class Served:
    """One model behind the endpoints, and their limits.

    `tells_cached_text` says whether clients of a namespace may see a few tokens of what others in it sent.
    """

    engine: Engine
    lanes: Lanes
    model_id: str
    created: int  # Unix time at which serving began
    max_body_bytes: int
    tells_cached_text: bool
    keep_alive_s: float = KEEP_ALIVE_S
    default_truncation: Truncation = "none"

    def check_model(self, model_id: str | None) -> None:
        """Raise HTTPError(404) unless `model_id` is the model served here, or None."""
        if model_id not in (None, self.model_id):
            message = f"there is no model {model_id!r:.200} here; this server has {self.model_id!r}"
            raise HTTPError(404, message, param="model", code="model_not_found")

    def truncates(self, asked: Truncation | None) -> bool:
        """Whether a request that says this, or nothing, loses what does not fit."""
        return (asked or self.default_truncation) == "middle"

    def namespace(self, request: Request, cache_salt: str | None, prompt_cache_key: str | None) -> bytes:
        """The part of the cache that a request may use: its key's own, and of that its salt's and cache key's.

        Raises:
            InvalidParameter: the salt or the cache key is too long.
        """
        namespace = self.engine.namespaces.of(CacheScope(api_key_of(request), cache_salt, prompt_cache_key))
        record_of(request).namespace = namespace
        return namespace

    async def read(self, request: Request, type: type[T], *, max_bytes: int | None = None) -> T:
        """The request's body as `type`; see `read_json`. `max_bytes` is a bound of its own, below everybody's."""
        most = self.max_body_bytes if max_bytes is None else min(max_bytes, self.max_body_bytes)
        return await read_json(request, type, max_bytes=most)

    def token_text(self, token_id: int) -> str:
        """The text of one token, with the space that a text would lose at its beginning; half a character is U+FFFD."""
        return self.text([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, of which a character may need several."""
        return self.engine.tokenizer.token_bytes(token_id)

    def begins_character(self, token_id: int) -> bool:
        """Whether a prompt may be cut before a token; before one that is unknown, of which the engine says more."""
        try:
            spelled = self.token_bytes(token_id)
        except TokenizerError:
            return True
        return not spelled or spelled[0] & 0xC0 != 0x80

    def usage(self, completions: Sequence[Completion], num_choices: int = 1) -> UsageReply:
        """Tokens of a request's completions, where they came from, and why not more were cached; see `usage_of`."""
        return usage_of(completions, num_choices, tells_cached_text=self.tells_cached_text)

    def text(self, token_ids: Sequence[int]) -> str:
        """What ids spell; a character that is cut is U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")


def json_response(value: msgspec.Struct, status: int = 200) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
