"""Short chat templates that write tools and calls as published ones do: tagged as Qwen2.5's, bare as Llama 3.1's."""

from __future__ import annotations

QWEN = """\
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set system, turns = 'Be helpful.', messages %}
{%- endif %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\nCall one with <tool_call> tags.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in turns %}
    {%- if message.role == 'tool' %}
        {%- if loop.index0 == 0 or turns[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or turns[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content or not message.tool_calls %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>ipython\\n' + (message.content | tojson) + '<|im_end|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
        {%- set function = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n{"name": "' + function.name + '", "parameters": ' }}
        {{- (function.arguments | tojson) + '}' + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if tools and loop.first %}
            {{- 'Answer with {"name": name, "parameters": arguments}, of these functions:\\n' }}
            {%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
        {%- endif %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

NO_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
