"""The models whose tool loops are replayed: a tokenizer, and a chat template that writes calls and reasoning alike.

Knows templates; weights are not needed.
"""

from __future__ import annotations

import functools
import gzip
from collections.abc import Mapping
from pathlib import Path

from ..replay.models import Hybrid, ReplayModel, TalkingArtifact, artifact

TOKENIZERS = Path(__file__).resolve().parents[2] / "tests" / "data" / "tokenizers"

_SYSTEM_AND_TOOLS = """\
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, turns = 'You are a helpful assistant.', messages %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nYou may call functions.\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
"""
_RESULT = """\
        {%- if loop.first or turns[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or turns[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
"""
_CALL = """\
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
"""

_QWEN25 = f"""\
{_SYSTEM_AND_TOOLS}
{{%- for message in turns %}}
    {{%- if message.role == 'tool' %}}
{_RESULT}
    {{%- else %}}
        {{{{- '<|im_start|>' + message.role }}}}
        {{%- if message.content or not message.tool_calls %}}{{{{ '\\n' + message.content }}}}{{% endif %}}
        {{%- for call in message.tool_calls or [] %}}
            {{{{- '\\n' }}}}
{_CALL}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""

_QWEN3 = f"""\
{_SYSTEM_AND_TOOLS}
{{%- set last = namespace(query=-1) %}}
{{%- for message in turns %}}
    {{%- if message.role == 'user' %}}{{% set last.query = loop.index0 %}}{{% endif %}}
{{%- endfor %}}
{{%- for message in turns %}}
    {{%- if message.role == 'tool' %}}
{_RESULT}
    {{%- else %}}
        {{{{- '<|im_start|>' + message.role + '\\n' }}}}
        {{%- set is_now = message.role == 'assistant' and loop.index0 > last.query %}}
        {{%- if is_now and (loop.last or message.reasoning_content) %}}
            {{{{- '<think>\\n' + (message.reasoning_content or '') | trim + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- message.content }}}}
        {{%- for call in message.tool_calls or [] %}}
            {{%- if message.content or not loop.first %}}{{{{ '\\n' }}}}{{% endif %}}
{_CALL}
        {{%- endfor %}}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}
"""

MODELS: Mapping[str, ReplayModel] = {
    "Qwen2.5": ReplayModel("qwen2", _QWEN25, "<|im_end|>"),
    "Qwen3, which thinks": ReplayModel("qwen2", _QWEN3, "<|im_end|>"),
}
"""Reasoning stays in the prompt until the next user message, as in Qwen3's template."""


def thinks(name: str) -> bool:
    """Return whether a model of `MODELS` reasons before it answers."""
    return MODELS[name].template is _QWEN3


@functools.cache
def artifact_of(name: str, hybrid: Hybrid | None = None) -> TalkingArtifact:
    """Return a model with the tokenizer in the repository; for a `hybrid`, with its states."""
    model = MODELS[name]
    return artifact(model, tokenizer_json_of(model), hybrid)


def tokenizer_json_of(model: ReplayModel) -> str:
    """Return the tokenizer in the repository."""
    return gzip.decompress((TOKENIZERS / f"{model.tokenizer}.json.gz").read_bytes()).decode()
