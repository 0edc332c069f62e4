"""The tool-call formats of models, and which of them a chat template writes.

A format is recognized from how the template renders a call, not from the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from ...errors import InvalidRequest
from ..chat_template import ChatTemplate
from .literal_arguments import LiteralArguments
from .tagged_arguments import TaggedArguments
from .tool_format import HeadedFormat, Tool, ToolFormat

HERMES: Final = ToolFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n")
"""Hermes 2 Pro's, Qwen's and Granite 4's."""

HERMES_CONTENT: Final = replace(HERMES, is_content=True)
"""SmolLM3's, if the template describes it; it writes no calls."""

LLAMA3: Final = ToolFormat('{"name": "', '", "parameters": ', "}", "{", None)
"""Llama 3.1's JSON, one call per reply."""

PLAIN: Final = ToolFormat('{"name": "', '", "arguments": ', "}", "{", "\n", is_native=False)
"""Ours, for templates without tools, or with a format that is unknown here."""

QWEN_CODER: Final = ToolFormat(
    *("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "<tool_call>", "\n"),
    TaggedArguments("<parameter=", ">\n", "\n</parameter>\n", is_python=True),
)
"""Qwen3-Coder's, Qwen 3.5's and Nemotron 3's."""

SEED: Final = ToolFormat(
    *("<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "<seed:tool_call>", "\n"),
    TaggedArguments("<parameter=", ">", "</parameter>\n", is_python=True),
)
"""Seed-OSS's."""

GLM: Final = ToolFormat(
    *("<tool_call>", "\n", "</tool_call>", "<tool_call>", "\n"),
    TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
"""GLM 4.5's."""

GLM_TIGHT: Final = ToolFormat(
    *("<tool_call>", "", "</tool_call>", "<tool_call>", ""),
    TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
"""GLM 4.7's."""

MINIMAX: Final = ToolFormat(
    *('<invoke name="', '">\n', "</invoke>\n", "<minimax:tool_call>", ""),
    TaggedArguments('<parameter name="', '">', "</parameter>\n"),
    open="<minimax:tool_call>\n",
    close="</minimax:tool_call>",
)
"""MiniMax M2's."""

ATEM: Final = ToolFormat(
    *('<atem:invoke name="', '">\n', "</atem:invoke>\n", "<atem:function_calls>", None),
    TaggedArguments('<atem:parameter name="', '">', "</atem:parameter>\n"),
    open="<atem:function_calls>\n",
    close="</atem:function_calls>",
)
"""Muse Glimmer's, after a header that names the function, too; the template gives each call its own part."""

DSML: Final = ToolFormat(
    *('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", "<｜DSML｜function_calls>", ""),
    TaggedArguments('<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>\n", '" string="true">'),
    open="<｜DSML｜function_calls>\n",
    close="</｜DSML｜function_calls>",
)
"""DeepSeek V3.2's."""

MISTRAL_LIST: Final = ToolFormat(
    *('{"name": "', '", "arguments": ', ', "id": "{id}"}', "[TOOL_CALLS]", ", "), open="[TOOL_CALLS][", close="]"
)
"""Mistral Nemo's."""

MISTRAL: Final = ToolFormat("[TOOL_CALLS]", "[ARGS]", "", "[TOOL_CALLS]", "")
"""Ministral 3's and Devstral's."""

MISTRAL_IDS: Final = replace(MISTRAL, middle="[CALL_ID]{id}[ARGS]")
"""Mistral Small 3.2's."""

DEEPSEEK: Final = ToolFormat(
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", ""),
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
)
"""DeepSeek V3.1's, if the template describes tools, which the published one does not."""

KIMI: Final = ToolFormat(
    *("<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", ""),
    open="<|tool_calls_section_begin|>",
    close="<|tool_calls_section_end|>",
    id_text="functions.{name}:{number}",
)
"""Kimi K2's, of which some templates count calls, and some write the calls' own ids."""

NEMOTRON: Final = ToolFormat(
    *('{"name": "', '", "arguments": ', "}", "<TOOLCALL>", ", "), open="<TOOLCALL>[", close="]</TOOLCALL>"
)
"""Nemotron Nano 2's."""

HUNYUAN: Final = ToolFormat(
    *('{"name": "', '", "arguments": ', "}", "<tool_calls>", ", "), open="<tool_calls>[", close="]</tool_calls>"
)
"""Hunyuan A13B's."""

HUNYUAN_DENSE: Final = ToolFormat(
    *("<tool_call>", "\n```json\n", "\n```</tool_call>", "<tool_calls>", "\n"),
    open="<tool_calls>",
    close="</tool_calls>",
)
"""Hunyuan's dense models'."""

COHERE: Final = ToolFormat(
    *('    {"tool_call_id": "{index}", "tool_name": "', '", "parameters": ', "}", "<|START_ACTION|>", ",\n"),
    open="<|START_ACTION|>[\n",
    close="\n]<|END_ACTION|>",
)
"""Command R7B's and A's, whose template counts the calls of a conversation."""

PHI: Final = ToolFormat('<|tool_call|>{"name": "', '", "arguments": ', "}<|/tool_call|>", "<|tool_call|>", "")
"""Phi-4-mini's, if the template writes calls."""

GRANITE: Final = ToolFormat(
    *('{"name": "', '", "arguments": ', "}", "<|tool_call|>", ", "),
    open="<|tool_call|>[",
    close="]",
    is_content=True,
)
"""Granite 3's, whose template describes it and writes no calls."""

OLMO: Final = ToolFormat(
    *("", "", "", "<function_calls>", "\n", LiteralArguments("(", ")", "=", ", ", is_json=True)),
    open="<function_calls>",
    close="</function_calls>",
)
"""OLMo 3's."""

LFM: Final = ToolFormat(
    *("", "", "", "<|tool_call_start|>", ", ", LiteralArguments("(", ")", "=", ", ")),
    open="<|tool_call_start|>[",
    close="]<|tool_call_end|>",
)
"""LFM 2.5's if the template writes calls."""

LFM_CONTENT: Final = replace(LFM, is_content=True)
"""LFM 2's, and LFM 2.5's if the template writes none."""

GEMMA: Final = ToolFormat(
    *("<|tool_call>call:", "", "<tool_call|>", "<|tool_call>", ""), LiteralArguments("{", "}", ":", ",", '<|"|>')
)
"""Gemma 4's."""

FUNCTION_GEMMA: Final = ToolFormat(
    *("<start_function_call>call:", "", "<end_function_call>", "<start_function_call>", ""),
    LiteralArguments("{", "}", ":", ",", "<escape>"),
)
"""FunctionGemma's."""

HARMONY: Final = HeadedFormat(" to=functions.", "<|channel|>commentary json<|message|>", "", " to=functions.", None)
"""gpt-oss's."""

KNOWN: Final = (
    *(HERMES, replace(HERMES, separator=""), LLAMA3),
    *(QWEN_CODER, replace(QWEN_CODER, separator=""), SEED, GLM, GLM_TIGHT, MINIMAX, ATEM, DSML),
    *(MISTRAL_LIST, MISTRAL, MISTRAL_IDS, DEEPSEEK, KIMI, NEMOTRON, HUNYUAN, HUNYUAN_DENSE),
    *(LFM, GEMMA, FUNCTION_GEMMA, HARMONY, COHERE, PHI, OLMO),
    *(replace(HERMES, begin='<tool_call>{"name": "', end="}</tool_call>", separator=between) for between in ("\n", "")),
    replace(MISTRAL_LIST, open="[TOOL_CALLS] ["),
    replace(DSML, trigger="<｜DSML｜tool_calls>", open="<｜DSML｜tool_calls>\n", close="</｜DSML｜tool_calls>"),
    replace(
        DEEPSEEK,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
    ),
    ToolFormat("<function=", ">", "</function>", "<function=", ""),
)

_TOLD: Final = {
    "<|tool_call|>": GRANITE,
    "<|tool_list_start|>": LFM_CONTENT,
    "List of tools: [": LFM_CONTENT,
    '<tool_call>\n{"name": <function-name>, "arguments":': HERMES_CONTENT,
}
"""Formats by the text with which templates that write no calls describe tools."""

_ID = "abcdefgh0"  # Mistral's templates require nine letters and digits
_ARGUMENTS = '{"fred": true, "plugh": 1, "waldo": "x y"}'


def format_of(template: ChatTemplate) -> ToolFormat:
    """Return the format of the model with this chat template: the one in which it renders earlier calls.

    If it renders none, the one in which it describes tools; `PLAIN` if that is unknown, too.

    >>> format_of(ChatTemplate("{% for message in messages %}{{ message.content }}{% endfor %}")) is PLAIN
    True
    """
    for formats, ids in ((KNOWN, (_ID, _ID)), ((KIMI,), ("functions.xyzzy:0", "functions.corge:1"))):
        for num_calls in (2, 1):
            rendered = _render_calls(template, num_calls, ids)
            for format in formats if rendered is not None else ():
                text = format.text_of([("xyzzy", _ARGUMENTS), ("corge", "{}")][:num_calls], [_ID, _ID])
                if text in str(rendered) and (num_calls == 2) <= (format.separator is not None):
                    return format
    told = _render_calls(template, 0, ()) or ""
    return next((format for mark, format in _TOLD.items() if mark in told), PLAIN)


def _render_calls(template: ChatTemplate, num_calls: int, ids: Sequence[str]) -> str | None:
    """Return a made-up conversation as the template renders it; None if it refuses the calls, or leaves out tools.

    Args:
        num_calls: of the one assistant's message, each with a result; 0 to 2.
        ids: of the calls; not more calls are made.
    """
    values: list[tuple[str, dict[str, object]]] = [("xyzzy", {"fred": True, "plugh": 1, "waldo": "x y"}), ("corge", {})]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, values[:num_calls], strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "c"}
        for call, (name, _) in zip(calls, values, strict=False)
    ]
    asked = {"role": "assistant", "content": "", "tool_calls": calls}
    messages: list[Mapping[str, object]] = [{"role": "user", "content": "a"}, *([asked] if calls else []), *results]
    tool = Tool("quux", {"type": "object", "properties": {}}, description="d")
    try:
        rendered = template.render(messages, tools=[tool.for_template()])
    except InvalidRequest:
        return None
    return rendered if tool.name in rendered else None
