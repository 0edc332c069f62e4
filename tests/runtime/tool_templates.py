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


def calling(calls: str) -> str:
    """A template that tells of tools in JSON, and writes the calls of a message by a piece of Jinja."""
    return _CALLING.replace("CALLS", calls)


_CALLING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- if message.tool_calls %}CALLS{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_EACH = "{% for call in message.tool_calls %}{% set f = call.function %}"
_PYTHONS = "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
_JSONS = "{{ value if value is string else value | tojson }}"
_CHECKED = "{% if call.id | length != 9 %}{{ raise_exception('an id has nine letters and digits') }}{% endif %}"


def _tagged(begin: str, middle: str, open: str, between: str, value: str, close: str, end: str) -> str:
    items = "{% for key, value in f.arguments | items %}" + f"{open}{{{{ key }}}}{between}{value}{close}{{% endfor %}}"
    return begin + "{{ f.name }}" + middle + items + end


_DSML = "｜DSML｜"
CALLS = {
    "qwen-coder": _EACH
    + "{{ '' if loop.first else '\n' }}"
    + _tagged(
        *("<tool_call>\n<function=", ">\n", "<parameter=", ">\n", _PYTHONS, "\n</parameter>\n"),
        "</function>\n</tool_call>{% endfor %}",
    ),
    "seed": _EACH
    + "{{ '' if loop.first else '\n' }}"
    + _tagged(
        *("<seed:tool_call>\n<function=", ">\n", "<parameter=", ">", _PYTHONS, "</parameter>\n"),
        "</function>\n</seed:tool_call>{% endfor %}",
    ),
    "glm": _EACH
    + "{{ '' if loop.first else '\n' }}"
    + _tagged(
        *("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", _JSONS, "</arg_value>\n"),
        "</tool_call>{% endfor %}",
    ),
    "glm-tight": _EACH
    + _tagged(
        *("<tool_call>", "", "<arg_key>", "</arg_key><arg_value>", _JSONS, "</arg_value>"),
        "</tool_call>{% endfor %}",
    ),
    "minimax": "<minimax:tool_call>\n"
    + _EACH
    + _tagged('<invoke name="', '">\n', '<parameter name="', '">', _JSONS, "</parameter>\n", "</invoke>\n{% endfor %}")
    + "</minimax:tool_call>",
    "dsml": f"<{_DSML}function_calls>\n"
    + _EACH
    + _tagged(
        *(f'<{_DSML}invoke name="', '">\n', f'<{_DSML}parameter name="'),
        '" string="{{ (value is string) | string | lower }}">',
        *(_JSONS, f"</{_DSML}parameter>\n", f"</{_DSML}invoke>\n{{% endfor %}}"),
    )
    + f"</{_DSML}function_calls>",
    "mistral-list": "[TOOL_CALLS]["
    + _EACH
    + _CHECKED
    + """{{ '' if loop.first else ', ' }}{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) }}"""
    + """{{ ', "id": "' + call.id + '"}' }}{% endfor %}]""",
    "mistral": _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "mistral-ids": _EACH
    + _CHECKED
    + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "deepseek": "<｜tool▁calls▁begin｜>"
    + _EACH
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}"
    + "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|>"
    + _EACH
    + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    + "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "lfm": "<|tool_call_start|>["
    + _EACH
    + """{{ '' if loop.first else ', ' }}{{ f.name }}({% for key, value in f.arguments | items %}"""
    + """{{ '' if loop.first else ', ' }}{{ key }}={{ "'" + value + "'" if value is string else """
    + "value | tojson if value is mapping else value | string }}{% endfor %}){% endfor %}]<|tool_call_end|>",
    "gemma": _EACH
    + "<|tool_call>call:{{ f.name }}{{ '{' }}{% for key, value in f.arguments | dictsort %}"
    + """{{ '' if loop.first else ',' }}{{ key }}:{{ '<|"|>' + value + '<|"|>' if value is string else """
    + "value | tojson }}{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
    "nemotron": "<TOOLCALL>["
    + _EACH
    + """{{ '' if loop.first else ', ' }}{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) }}"""
    + "{{ '}' }}{% endfor %}]</TOOLCALL>",
    "hunyuan": "<tool_calls>["
    + _EACH
    + """{{ '' if loop.first else ', ' }}{{ '{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) }}"""
    + "{{ '}' }}{% endfor %}]</tool_calls>",
    "hunyuan-dense": "<tool_calls>"
    + _EACH
    + "{{ '' if loop.first else '\n' }}<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>"
    + "{% endfor %}</tool_calls>",
    "cohere": "<|START_ACTION|>[\n"
    + _EACH
    + """    {{ '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + f.name + '", "parameters": ' }}"""
    + """{{ (f.arguments | tojson) + '}' + ('' if loop.last else ',') + '\n' }}{% endfor %}]<|END_ACTION|>""",
    "phi": _EACH
    + """{{ '<|tool_call|>{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}<|/tool_call|>' }}"""
    + "{% endfor %}",
    "olmo": "<function_calls>"
    + _EACH
    + "{{ f.name }}({% for key, value in f.arguments | items %}{{ '' if loop.first else ', ' }}{{ key }}="
    + "{{ value | tojson }}{% endfor %}){{ '' if loop.last else '\n' }}{% endfor %}</function_calls>",
}
"""How families write calls, in Jinja."""

GRANITE = calling("").replace(
    "'<|im_start|>system\\n'", "'<|im_start|>system\\nrespond with <|tool_call|> and a list of '"
)
LFM = calling("").replace("'<|im_start|>system\\n'", "'<|im_start|>system\\nList of tools: <|tool_list_start|>'")
"""Templates that tell of tools as Granite 3.3's and LFM 2's, and write no calls but those in a content."""

SMOLLM3 = (
    calling("")
    .replace("if tools", "if xml_tools")
    .replace("in tools", "in xml_tools")
    .replace("(tool | tojson)", "(tool | string)")
    .replace(
        "'<|im_start|>system\\n'",
        """'<|im_start|>system\\nSay <tool_call>\\n{"name": <function-name>, "arguments": <args>}'""",
    )
)
"""As SmolLM3's, which tells of tools by another name, and writes no calls."""

MUSE = """\
{%- if tools %}
    {{- '<|start|>system<|message|>' }}
    {%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
    {{- '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|im_end|>' }}
    {%- else %}
        {%- if message.reasoning_content %}
            {{- '<|start|>assistant to=self<|message|>' + message.reasoning_content + '<|eom|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=' + call.function.name + '<|message|><atem:function_calls>\\n' }}
            {{- '<atem:invoke name="' + call.function.name + '">\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<atem:parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                {{- '</atem:parameter>\\n' }}
            {%- endfor %}
            {{- '</atem:invoke>\\n</atem:function_calls>' + ('<|im_end|>' if loop.last else '<|eom|>') }}
        {%- endfor %}
        {%- if not message.tool_calls %}
            {{- '<|start|>assistant to=user<|message|>' + message.content + '<|im_end|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
"""As Muse Glimmer's; `<|im_end|>` ends turns."""

HARMONY = """\
{%- if tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- for tool in tools %}{{ '// ' + tool.function.description + '\\n' + (tool | tojson) }}{% endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.tool_calls and message.content and message.thinking %}
            {{- raise_exception('words and a thought before a call') }}
        {%- endif %}
        {%- if message.thinking and (message.tool_calls or loop.last) %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- set function = message.tool_calls[0].function %}
            {{- '<|start|>assistant to=functions.' + function.name + '<|channel|>commentary json<|message|>' }}
            {{- (function.arguments | tojson) + '<|im_end|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|im_end|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
"""As gpt-oss's; `<|im_end|>` ends calls and replies."""
