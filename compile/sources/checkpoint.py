"""What several file formats share: ends of replies, values held to their ranges, errors of one line."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeVar

import msgspec
from radixlm.runtime.errors import CorruptSource

# Texts of tokens that end a reply, whatever the metadata declares (llama.cpp's end-of-generation list).
END_OF_REPLY = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|eot|>",
    "<|user|>",
    "<|observation|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<EOT>",
    "[EOT]",
    "[e~[",  # MiniMax M2
)

_ENDS_OF_PARTS = ("<|return|>", "<|call|>")  # gpt-oss has both: there `<|end|>` ends a part of a reply, as a thought is

T = TypeVar("T")


def ends_of_reply(texts: Container[str]) -> list[str]:
    """The well-known ends of a reply in a vocabulary.

    >>> ends_of_reply({"<|end|>", "<|user|>"}), ends_of_reply({"<|end|>", "<|return|>", "<|call|>"})
    (['<|end|>', '<|user|>'], ['<|return|>', '<|call|>'])
    """
    has_parts = all(text in texts for text in _ENDS_OF_PARTS)
    return [text for text in END_OF_REPLY if text in texts and not (has_parts and text == "<|end|>")]


def checked(label: str, values: Mapping[str, Any], type_: type[T]) -> T:
    """`values` as `type_`, every number in its range; raises CorruptSource that names one which is not."""
    try:
        return msgspec.convert(dict(values), type_)
    except msgspec.ValidationError as error:
        raise CorruptSource(f"{label}: {error}; the source's configuration cannot be right") from error


def one_line(error: Exception) -> str:
    """What a library's error says, in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
