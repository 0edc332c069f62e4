"""Load the conversation that a response continues, and store the response so that others can continue it.

Knows items and messages; `stored/turns.py` has the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import msgspec
from starlette.requests import Request

from ...cache.cache_namespace import CacheScope
from ...engine.completion import Completion
from ...engine.generated_turns import GeneratedTurns
from ...errors import InvalidParameter, StoreOff
from ..chat_task import ChatTask
from ..errors import HTTPError
from ..http.api_keys import api_key_of
from ..http.request_body import num_body_bytes_of
from ..request_log import new_id, record_of
from ..served import Served
from ..stored.background import BackgroundResponses, StoredStatus
from ..stored.stored import Stored
from ..stored.turns import Path, Turn
from .response_items import History, InputItem
from .response_requests import ResponseRequest

NOT_KEPT = "this server stores no responses (--no-keep-responses)"
_ID_OF = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}


@dataclass(frozen=True)
class Continuation:
    """A request joined with the stored conversation that it continues.

    Attributes:
        history: the whole conversation; stored items have negative places.
        chat: the chat request for the engine.
    """

    history: History
    chat: ChatTask
    _body: ResponseRequest
    _path: Path
    _setup: bytes
    _scope: CacheScope
    _stored: Stored | None
    _namespace: bytes

    @classmethod
    async def of(
        cls, served: Served, request: Request, body: ResponseRequest, history: History, chat: ChatTask
    ) -> Continuation:
        """Load the stored conversation that a request continues.

        Raises:
            HTTPError: 404 if there is no such response or conversation.
            InvalidParameter: the request names both a response and a conversation.
            StoreOff: the disk failed.
        """
        scope = CacheScope(api_key_of(request), body.cache_salt)
        path = await _path(served, scope, body)
        num_bytes = sum(len(items) + len(response or b"") for items, response in path.turns)
        request.state.num_body_bytes = num_body_bytes_of(request) + num_bytes  # the length of the whole conversation

        def continued() -> Continuation:
            setup = _setup_of(served, body, chat)
            whole, task = history, chat
            if path.turns:
                whole, turns = _history(body, path, is_same_setup=path.setup == setup)
                task = replace(chat, messages=whole.messages, options=chat.options.changed(earlier=turns))
            stored = served.stored if body.is_kept else None
            return cls(whole, task, body, path, setup, scope, stored, record_of(request).namespace or b"")

        return await served.work_queues.submission.run(request, continued)

    @property
    def is_kept(self) -> bool:
        """Return whether the response is to be stored."""
        return self._stored is not None

    @property
    def background(self) -> BackgroundResponses:
        """The responses that are being made in the background, if they are to be stored."""
        assert self._stored is not None, "the request was checked"
        return self._stored.background

    async def begin(self, response_id: str, response: bytes) -> None:
        """Store a response that has just begun, as JSON.

        Raises:
            HTTPError: 404 if the response that it continues is gone.
            StoreOff: the disk failed.
        """
        assert self._stored is not None, "the request was checked"

        def turn() -> Turn:
            return Turn(response_id, self._path, self._namespace, self._items, response)

        if not await self._stored.turns.save(self._scope, turn):
            message = "the response that this one continues was deleted meanwhile; send the whole conversation as input"
            raise HTTPError(404, message, param="previous_response_id", code="previous_response_not_found")

    async def change(self, response_id: str, change: Callable[[bytes], bytes]) -> None:
        """Store `change` of a response that has begun. If the disk failed, the response counts as lost."""
        if self._stored is not None:
            with suppress(StoreOff):  # already logged
                await self._stored.turns.change_response(self._scope, response_id, change)

    async def keep(self, response_id: str, response: bytes, completion: Completion, *, is_truncated: bool) -> bool:
        """Store a response that has ended, as JSON. Returns whether it is stored."""
        if self._stored is None:
            return False
        has_ids = not is_truncated and completion.stop_reason is None and completion.usage.pruning is None

        def turn() -> Turn:
            return Turn(
                response_id,
                self._path,
                self._namespace,
                self._items,
                response,
                self._setup,
                (*completion.prompt_token_ids, *completion.token_ids) if has_ids else None,
            )

        try:
            return await self._stored.turns.save(
                self._scope,
                turn,
                conversation=self._body.conversation_id,
                replaces=bool(self._body.background),
            )
        except StoreOff:  # already logged; the reply is not affected
            return False

    @cached_property
    def _items(self) -> bytes:
        """The request's items as a JSON array. Those without an id have got one."""
        return b"[" + b",".join(item_json(item) for item in self._body.items) + b"]"


async def _path(served: Served, scope: CacheScope, body: ResponseRequest) -> Path:
    """Return the stored turns that the request continues, by response or conversation; none if it continues nothing.

    Raises:
        InvalidParameter: it names both.
        HTTPError: nothing is stored here.
    """
    previous, conversation = body.previous_response_id, body.conversation_id
    if not previous and conversation is None:
        return Path()
    if previous and conversation is not None:
        message = "previous_response_id and conversation are both set; send one of them"
        raise InvalidParameter(message, param="previous_response_id")
    if served.stored is None:
        param = "previous_response_id" if previous else "conversation"
        code = "previous_response_not_found" if previous else "conversation_not_found"
        raise HTTPError(404, f"{NOT_KEPT}; send the whole conversation as input", param=param, code=code)
    if previous:
        path = await served.stored.turns.path(scope, previous)
        status = StoredStatus.of(path.turns[-1][1] or b"{}")
        if not status.can_be_continued:
            message = f"the response {previous!r:.80} is {status.status}; continue one that is completed or incomplete"
            raise InvalidParameter(message, param="previous_response_id")
        return path
    return await served.stored.conversations.path(scope, conversation or "")


def _setup_of(served: Served, body: ResponseRequest, chat: ChatTask) -> bytes:
    """Return a digest of everything that a prompt depends on, except the items."""
    engine = served.engine
    tools, kwargs = chat.use.tools, chat.options.template_kwargs
    means = (engine.manifest.digest, engine.reply_options, body.instructions, tools, kwargs)
    return blake2b(msgspec.json.encode(means), digest_size=16).digest()


def _history(body: ResponseRequest, path: Path, *, is_same_setup: bool) -> tuple[History, GeneratedTurns | None]:
    """Return the whole conversation, and the turns whose stored token ids can be reused in the prompt."""
    earlier = [items_of(*turn) for turn in path.turns]
    history = body.history([item for items in earlier for item in items])
    if not is_same_setup:
        return history, None
    exact = History.of([item for items in earlier[: path.num_exact] for item in items]).messages
    first = int(body.instructions is not None)
    if history.messages[first : first + len(exact)] != exact:  # the next item extends the last message
        return history, None
    return history, GeneratedTurns(first + len(exact), path.token_ids)


class _Output(msgspec.Struct):
    output: list[InputItem]


def items_of(items: bytes, response: bytes | None) -> list[InputItem]:
    """Return the items of a turn: the request's input, and the response's output."""
    sent = msgspec.json.decode(items, type=list[InputItem])
    return sent if response is None else [*sent, *msgspec.json.decode(response, type=_Output).output]


def item_json(item: InputItem) -> bytes:
    """Return an item in the form in which it is listed: with an id, and its text as parts."""
    fields: dict[str, Any] = {name: value for name, value in msgspec.structs.asdict(item).items() if value is not None}
    fields.setdefault("id", new_id(_ID_OF.get(item.type, "item_")))
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        part = {"type": kind, "text": item.content}
        fields["content"] = [part | {"annotations": []} if item.role == "assistant" else part]
    elif item.content is not None:
        fields["content"] = list(_without_none(item.content))
    if isinstance(item.output, list):
        fields["output"] = list(_without_none(item.output))
    if item.summary is not None:
        fields["summary"] = list(_without_none(item.summary))
    fields.setdefault("status", "completed")
    return msgspec.json.encode(fields)


def _without_none(parts: Iterable[msgspec.Struct]) -> Iterable[dict[str, Any]]:
    for part in parts:
        yield {name: value for name, value in msgspec.structs.asdict(part).items() if value is not None}
