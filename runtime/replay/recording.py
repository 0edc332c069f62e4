"""The lines of a recording: the engine, and its requests with everything that decides their replies.

A file begins with a line about the engine; a line per request follows, in the order in which replies ended::

    {"event": "begin", "radixlm": "0.1.0", "name": "smollm2", "numeric_class": "fma", ...}
    {"event": "request", "id": "chatcmpl-7", "prompt": {"ids": [1, 9906]}, "params": {"seed": 7, ...}, ...}

Knows values and their JSON, not engines.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from ..artifact import WEIGHTS
from ..artifact.manifest import KVDType, Manifest, NumericClass
from ..chat.grammar import Grammar
from ..engine.completion import FinishReason, TokenLogprob
from ..engine.sampling_params import SamplingParams
from ..errors import InvalidParameter, RecordingUnusable
from ..kv_log.log import files_of
from ..version import VERSION

MAX_LINE_BYTES = 64 << 20
WhyNot = Literal["cancelled", "approximate", "constraint", "adapter"]
"""Why a request cannot be compared: it was cancelled, part of its prefix's KV was left out, its constraint is the
caller's own code, or it has a LoRA adapter, which the recording does not contain."""


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="begin"):
    """The engine that computed the replies after this line: radixlm's version, and the parts that decide bits."""

    radixlm: str
    model: str  # name on the command line
    name: str
    weights: str  # SHA-256
    numeric_class: NumericClass
    target: str
    kv_dtype: KVDType
    context_length: int  # of the engine

    @classmethod
    def of(cls, manifest: Manifest, *, model: str, context_length: int) -> Computed:
        """Return the line of an engine over an artifact."""
        return cls(
            radixlm=VERSION,
            model=model,
            name=manifest.name,
            weights=manifest.files[WEIGHTS].sha256,
            numeric_class=manifest.target.numeric_class,
            target=manifest.target.name,
            kv_dtype=manifest.kv.dtype,
            context_length=context_length,
        )


class RecordedPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt as it was computed, and what decides how its reply begins: see `PreparedPrompt`."""

    ids: tuple[int, ...]
    text: str | None = None  # of a chat, because it may open the reasoning
    space_id: int | None = None
    swallow_leading_space: bool = False
    healed: bytes = b""


class RecordedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="request"):
    """A request and its reply.

    Attributes:
        params: the fields of `SamplingParams` that differ from their defaults, with the seed that was used.
        is_chat: whether it is a conversation.
        why_not: why it cannot be compared.
        reply_ids: token ids of the reply.
        logprobs: a digest for each token: of its logprob, and of the most likely tokens that the request asked for.
    """

    id: str
    prompt: RecordedPrompt
    params: dict[str, Any]
    is_chat: bool = False
    grammar: Grammar | None = None
    why_not: WhyNot | None = None
    reply_ids: tuple[int, ...]
    logprobs: tuple[str, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if self.why_not is None and len(self.reply_ids) != len(self.logprobs):
            raise ValueError(f"{len(self.reply_ids)} tokens have {len(self.logprobs)} logprobs")

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters.

        Raises:
            InvalidParameter: this version does not know a parameter, or its value.
        """
        kinds = get_type_hints(SamplingParams)
        if unknown := [name for name in self.params if name not in kinds]:
            raise InvalidParameter(f"there is no sampling parameter {unknown[0]}")
        try:
            values = {name: msgspec.convert(value, kinds[name], str_keys=True) for name, value in self.params.items()}
        except msgspec.ValidationError as error:
            raise InvalidParameter(f"a sampling parameter cannot be read: {error}") from None
        return SamplingParams(**values)


Line = Computed | RecordedRequest
_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(Line)


def encoded(line: Line) -> str:
    """Return a line as JSON with a line feed."""
    return _ENCODER.encode(line).decode() + "\n"


def lines_of(path: Path) -> Iterator[Line]:
    """Yield the lines of a recording, first those of older files that it was rotated into.

    A line that was cut off because its process ended is skipped. It is the last, or another process begins after it.

    Raises:
        RecordingUnusable: a line is invalid, or a file does not begin with a line about the engine.
        OSError: a file cannot be read.
    """
    for file in files_of(path):
        with file.open("rb") as content:
            yield from _decode_lines(iter(partial(content.readline, MAX_LINE_BYTES), b""), file)


def _decode_lines(texts: Iterator[bytes], file: Path) -> Iterator[Line]:
    """Decode the lines of one file of a recording; `texts` are its lines as bytes.

    A line that cannot be decoded is skipped if the process was cut off there: if it is the last and has no line break,
    or an engine's line comes next.

    Raises:
        RecordingUnusable: another line is invalid, or the first is no engine's.
    """
    unread: RecordingUnusable | None = None
    is_begun, text = False, b""
    for number, text in enumerate(texts, 1):
        try:
            line = _DECODER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if unread is not None:
                raise unread from None
            unread = RecordingUnusable(f"{file}, line {number} is no line of a recording: {error}")
            continue
        is_begun = is_begun or isinstance(line, Computed)
        if unread is not None and not isinstance(line, Computed):
            raise unread
        if not is_begun:
            raise RecordingUnusable(f"{file} does not begin with what computed its replies")
        unread = None
        yield line
    if unread is not None and text.endswith(b"\n"):
        raise unread


def params_of(params: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, by name."""
    plain = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


def digests_of(logprobs: Iterable[TokenLogprob]) -> tuple[str, ...]:
    """Return a digest of all bits of each token's logprobs."""
    return tuple(_digest_of(each) for each in logprobs)


def _digest_of(logprob: TokenLogprob) -> str:
    """Return a hash of a generated token's logprob and rank and of the top logprobs, equal only if all bits are."""
    digest = blake2b(struct.pack("<qdq", logprob.token_id, logprob.logprob, logprob.rank), digest_size=8)
    for token_id, value in logprob.top:
        digest.update(struct.pack("<qd", token_id, value))
    return digest.hexdigest()
