"""Short chat templates that write thoughts as published ones do, each with a way of its own."""

from __future__ import annotations

HYBRID = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if loop.first and tools %}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{% endif %}
        {%- if message.role == 'assistant' and (message.reasoning_content or loop.last) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""As Qwen3's: the model begins its thought itself, and thoughts stay in the history."""

OPENED = """\
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}
"""
"""As DeepSeek-R1's: the prompt begins the thought, and no thought is seen again."""

HEADED = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|im_start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|im_start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}
"""
"""As gpt-oss's: a reply has parts with headers, and the template says `thinking`."""

PARTS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""As Ministral's: a thought is a part of the content."""

OF_CALLS = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.tool_calls %}
        {{- '<|channel>thought\\n' + (message.reasoning or '') + '\\n<channel|>' }}
        {%- for call in message.tool_calls %}{{ '<call>' + call.function.name + '</call>' }}{% endfor %}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""As Gemma 4's: only a message that calls tools keeps its thought."""

SPECIAL = HYBRID.replace("</think>", "<reponame>").replace("<think>", "<file_sep>")
"""As `HYBRID`, with tags that are special tokens of SmolLM2's."""
