"""Chat templates render as in transformers, and nothing in one gets out of its sandbox."""

from __future__ import annotations

import gzip
import itertools
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from radixlm.runtime.chat import chat_template
from radixlm.runtime.chat.chat_template import MAX_TEMPLATE_LENGTH, RESERVED_KWARGS, ChatTemplate, checked_kwargs
from radixlm.runtime.chat.render_budget import MAX_CHARACTERS, RenderBudget, TooCostly
from radixlm.runtime.chat.template_sandbox import TemplateSandbox
from radixlm.runtime.engine.prompts import Prompts
from radixlm.runtime.errors import InvalidParameter, InvalidRequest

from ..fake_artifact import fake_artifact

DATA = Path(__file__).resolve().parents[2] / "data"

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be brief.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

USER = {"role": "user", "content": "Hi"}


def test_renders_chatml_with_its_default_system_prompt_and_generation_prompt() -> None:
    rendered = ChatTemplate(CHATML).render([USER])
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_prompt_can_be_left_out() -> None:
    assert ChatTemplate(CHATML).render([USER], add_generation_prompt=False).endswith("Hi<|im_end|>\n")


def test_renders_llama2_with_special_tokens() -> None:
    template = ChatTemplate(LLAMA2, bos_token="<s>", eos_token="</s>")
    messages = [USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    assert template.render(messages) == "<s>[INST] Hi [/INST] Hello. </s><s>[INST] Bye [/INST]"


@pytest.mark.parametrize("name", ["plain center", "plain wordwrap", "pay part"])
def test_map_finds_no_filter_of_the_sandbox_itself_which_might_pay_nothing(name: str) -> None:
    with pytest.raises(InvalidRequest, match="No filter named"):
        ChatTemplate("{{ ['x'] | map('" + name + "', 30000000) | first | length }}").render([])


def test_what_the_template_raises_is_the_message_of_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        ChatTemplate(LLAMA2).render([USER, USER])


def test_tojson_is_not_escaped_for_html_and_takes_indent() -> None:
    assert ChatTemplate("{{ {'a': '<é>'} | tojson }}").render([]) == '{"a": "<é>"}'
    assert ChatTemplate("{{ [1] | tojson(indent=2) }}").render([]) == "[\n  1\n]"


def test_loop_controls_and_block_trimming_are_those_of_transformers() -> None:
    source = "{% for i in range(9) %}\n  {% if i == 2 %}\n  {% break %}\n  {% endif %}\n{{ i }}\n{% endfor %}"
    assert ChatTemplate(source).render([]) == "0\n1\n"


GENERATION = (
    "{%- for m in messages %}\n  {%- set who = m.role %}\n  {%- if m.role == 'assistant' %}\n"
    "    {% generation %}\n{%- set who = 'model' %}\n    {{- '<' ~ who ~ '>' ~ m.content -}}{{ eos_token }}\n"
    "    {% endgeneration %}\n  {%- else %}\n{{ who }}:{{ m.content }}\n  {%- endif %}\n{%- endfor %}"
)


def test_generation_tags_are_accepted_and_their_body_is_rendered() -> None:
    """A template with them compiled, and then nothing of the artifact could be used."""
    messages = [USER, {"role": "assistant", "content": "Hello."}, USER]
    assert ChatTemplate(GENERATION, eos_token="</s>").render(messages) == "user:Hi<model>Hello.</s>\nuser:Hi"


def test_a_generation_tag_without_its_end_is_not_valid_jinja() -> None:
    with pytest.raises(InvalidRequest, match=r"not valid Jinja.*endgeneration"):
        ChatTemplate("{% generation %}a")


def test_strftime_now_formats_the_date() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]).isdigit()


def test_messages_are_not_changed_by_rendering() -> None:
    message = {"role": "user", "content": "Hi"}
    with pytest.raises(InvalidRequest):
        ChatTemplate("{{ messages.append(1) }}").render([message])
    assert message == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.no.such }}",
        "{% for i in range(100000000) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_an_invalid_request_of_one_line(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template fails") as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_jinja_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="not valid Jinja"):
        ChatTemplate("{% for %}")


def test_a_template_may_not_be_longer_than_the_limit() -> None:
    with pytest.raises(InvalidRequest, match=f"{MAX_TEMPLATE_LENGTH + 1} characters"):
        ChatTemplate("x" * (MAX_TEMPLATE_LENGTH + 1))


def test_rendering_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_LENGTH", 1000)
    with pytest.raises(InvalidRequest, match="more than 1000 characters"):
        ChatTemplate("{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}").render([])


BOMBS = (
    # one operation
    "{{ 'a' * 500000000 }}",
    "{{ 500000000 * 'a' }}",
    "{% set a = [0] * 500000000 %}",
    "{{ 10 ** (10 ** 10) }}",
    "{% generation %}{{ 'a' * 500000000 }}{% endgeneration %}",
    "{{ '%500000000d' % 1 }}",
    "{{ '%*d' % (500000000, 1) }}",
    "{{ '%(a).500000000f' % {'a': 1} }}",
    "{{ '{:>500000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 500000000) }}",
    "{{ '%500000000d' | format(1) }}",
    "{{ 'a'.ljust(500000000) }}",
    "{{ 'a'.zfill(500000000) }}",
    "{{ 'a' | center(500000000) }}",
    "{{ ('\t' * 100000).expandtabs(100000) }}",
    "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "{{ ('a' * 100000) | replace(new='b' * 100000, old='a') }}",
    "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "{{ ('a' * 100000).join('b' * 100000) }}",
    "{{ (['a' * 1000] * 30000) | join('b' * 10000) }}",
    "{{ ('a\n' * 100000) | indent(100000) }}",
    "{{ [1] | tojson(indent=500000000) }}",
    "{{ 1 | round(500000000, 'ceil') }}",
    "{{ [1] | batch(500000000, 0) | list }}",
    "{{ [1] | slice(500000000) | list }}",
    "{% set a = ([[0] * 1000] * 600) | sum(start=[]) %}",
    "{{ lipsum(n=1000000) }}",
    "{{ ('\u00e9' * 1000000).encode('punycode') }}",
    "{{ (1).to_bytes(500000000, 'big') }}",
    "{{ ('<!--' * 1000000) | striptags }}",
    # many small ones
    "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set n = namespace(a='a') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a=3) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "{% set n = namespace(a=[0]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}{{ n.a }}",
    "{% set n = namespace(a=(0,)) %}{% for i in range(99) %}{% set n.a = (n.a, n.a) %}{% endfor %}{{ n.a | tojson }}",
    "{% set n = namespace(a={}) %}{% for i in range(99) %}{% set n.a = {1: n.a, 2: n.a} %}{% endfor %}{{ n.a == n.a }}",
    "{% set n = namespace(a=[0]) %}{% for i in range(99) %}{% set n.a = dict(a=n.a, b=n.a) %}{% endfor %}{{ n.a }}",
    "{% set n = namespace(a=[0]) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% macro m() %}{% if varargs | string | length %}{{ m(varargs, varargs) }}{% endif %}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% set a = range(99999) | list %}{% endfor %}",
    "{% for i in range(99999) %}{% set a = range(99999) | map('string') | select | list %}{% endfor %}",
    "{% set a %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
    "{% set b = 'x' * 1000000 %}{% set a %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
    "{% set b = 'x' * 1000000 %}{% for i in range(99999) %}{% set a = b[1:] %}{% endfor %}",
    "{% set b = 'x' * 1000000 %}{% for i in range(99999) %}{% set a = b | upper %}{% endfor %}",
    "{% set b = 'x ' * 1000000 %}{% set a = b.split() %}{% set c = b | list %}{% set d = b.split(' ', -1) %}",
    # what is appended to is paid back only when it is gone
    "{% set n = namespace(a='x' * 2000000, l=[]) %}"
    "{% for i in range(99999) %}{% set n.a = n.a + 'y' %}{% set n.l = n.l + [n.a] %}{% endfor %}",
    "{% set n = namespace(a='x' * 2000000, l=[]) %}"
    "{% for i in range(99999) %}{% set n.a = 'y' ~ n.a %}{% set n.l = [n.l, n.a] %}{% endfor %}",
    "{% macro m(a) %}{{ m(a + 'y') }}{% endmacro %}{{ m('x' * 2000000) }}",
    "{% macro m(a) %}{{ m(a + [0]) }}{% endmacro %}{{ m([0] * 100000) }}",
    "{% set n = namespace(a=[0] * 100000, l=[]) %}"
    "{% for i in range(99999) %}{% set n.a = n.a + [0] %}{% set n.l = n.l + [n.a] %}{% endfor %}",
    "{% set n = namespace(a=[0] * 100000, l=[]) %}"
    "{% for i in range(99999) %}{% set n.l = n.l + [n.a[1:]] %}{% endfor %}",
    "{% set n = namespace(a='x ' * 2000000, l=[]) %}"
    "{% for i in range(99999) %}{% set n.l = [n.l, n.a.partition('y'), n.a.split('y')] %}{% endfor %}",
    "{% set n = namespace(a=[0]) %}{% for i in range(99) %}{% set n.a = [n.a] + [n.a] %}{% endfor %}{{ n.a }}",
    "{% set n = namespace(a=[0]) %}{% for i in range(99999) %}{% set n.a = [n.a] + [] %}{% endfor %}{{ n.a }}",
    "{% set b = 'x' * 10000000 %}{% for i in range(99999) %}{% set a = b + 'y' %}{% endfor %}",
    # what was paid may change only within a namespace
    "{% set n = namespace() %}{% set n.a = [n, n] %}{{ 'a' * 500000000 if n | string | length < 99 }}",
)


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_has_no_way_to_take_all_memory_or_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`{{ 'a' * 500000000 }}` took 2 GB before its length was looked at, and nothing looked at the time."""
    monkeypatch.setattr(chat_template, "RenderBudget", lambda: RenderBudget(max_seconds=0.2))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"the chat template (fails|does too much)|No filter named"):
            ChatTemplate(source).render([USER])
        assert tracemalloc.get_traced_memory()[1] < 400_000_000
    finally:
        tracemalloc.stop()


def test_rendering_stops_when_its_time_is_over() -> None:
    now = itertools.count()
    budget = RenderBudget(max_seconds=10, clock=lambda: float(next(now)))
    with pytest.raises(TooCostly, match="more than 10 s"):
        list(budget.each(range(10_000)))
    assert 10 < next(now) < 20


APPENDING = (
    "{% set n = namespace(o='') %}{% for m in messages %}{% set n.o = n.o + '<|' + m.role + '|>' + m.content %}"
    "{% endfor %}{{ n.o }}",
    "{% set n = namespace(o='') %}{% for m in messages %}{% set n.o = n.o ~ '<|' ~ m.role ~ '|>' ~ m.content %}"
    "{% endfor %}{{ n.o | default('none') }}",
    "{% set n = namespace(o='') %}{% for m in messages %}{% set n.o = m.content + n.o %}{% endfor %}{{ n.o }}",
    "{% set n = namespace(l=[]) %}{% for m in messages %}{% set n.l = n.l + [m] %}{% endfor %}"
    "{% for m in n.l %}{{ m.content }}{% endfor %}{{ n.l | length }}{{ n.l | tojson }}",
    "{% for m in messages %}{% for t in messages[loop.index0:] %}{{ t.content }}{% break %}{% endfor %}{% endfor %}",
    "{{ messages | map('list') | sum(start=[]) | join }}",
)


@pytest.mark.parametrize("source", APPENDING)
def test_what_is_appended_to_costs_what_is_new_and_what_is_held(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand messages of 120 characters in one text were refused; a list of as many took 180 times as long."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"hello {i:4d} " * 11} for i in range(1000)]
    looks = itertools.count()
    budget = RenderBudget(max_characters=12_000_000, clock=lambda: min(next(looks), 0))
    monkeypatch.setattr(chat_template, "RenderBudget", lambda: budget)
    assert ChatTemplate(source).render(messages) == _plain(source, messages)
    assert next(looks) < 2000  # at the time; each of a hundred steps, or of one long copy


READING = (
    "{{ messages[0].content.split() | length }}",
    "{{ messages[0].content.split() | join(' ') }}",
    "{{ messages[0].content.split('\n', 3)[-1] }}",
    "{{ messages[0].content | wordcount }}",
    "{% for line in messages[0].content.splitlines() %}{{ line }}{% endfor %}",
    "{{ messages[0].content | indent(2) }}",
    "{{ messages[0].content | indent('> ', first=true) }}",
)


@pytest.mark.parametrize("source", READING)
def test_a_long_text_can_be_cut_into_words_and_lines(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of 2 MB, with a tenth of the budget."""
    budget = RenderBudget(max_characters=MAX_CHARACTERS // 10, clock=lambda: 0)
    monkeypatch.setattr(chat_template, "RenderBudget", lambda: budget)
    messages = [{"role": "user", "content": "word " * 30_000 + "line\n" * 12_000}]
    assert ChatTemplate(source).render(messages) == _plain(source, messages)


@pytest.mark.parametrize("name", ["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
def test_a_slow_filter_is_refused_when_it_is_called(name: str) -> None:
    source = "{% if tools %}{{ tools[0] | " + name + " }}{% else %}{{ 1.5e3 * 1000000000 }}{% endif %}"
    assert ChatTemplate(source).render([]) == "1500000000000.0"
    with pytest.raises(InvalidRequest, match=f"it calls the filter {name}"):
        ChatTemplate(source).render([], tools=[{}])


def test_values_that_are_paid_back_are_like_others() -> None:
    source = (
        "{% set t = messages[0].content + '{} %s' %}{% set l = messages[:] + [1] %}"
        "{{ t.format(1)[-4:] }}{{ (t % 2)[-4:] }}{{ t is string }}{{ t == t ~ '' }}{{ {t: 1}[t] }}{{ t._budget }}"
        "{{ l is sequence }}{{ l[1:] }}{{ l == messages + [1] }}{{ l | tojson == l | list | tojson }}{{ t | e == t }}"
    )
    messages = [{"role": "user", "content": "a" * 2000}]
    assert ChatTemplate(source).render(messages) == _plain(source, messages)


def _plain(source: str, messages: list[dict[str, str]]) -> str:
    """What Jinja makes of it, unpaid."""
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source).render(messages=messages)


def test_what_templates_do_is_far_from_the_limits() -> None:
    source = (
        "{% macro say(m) %}{{ '<' ~ m.role ~ '>' }}{{ varargs | length }}{% endmacro %}{% set n = namespace(out='') %}"
        "{% for m in messages[::-1] if m.content is string %}{{ say(m, 1) }}{{ m.content.split('</a>')[-1] | trim }}"
        "{% set n.out = n.out + '%s: %5d|' % (m.role, loop.length) %}{{ '{:>3}'.format(loop.index) }}{% endfor %}"
        "{{ n.out | length }}{{ tools | tojson(indent=4) | indent(2) | replace('x', 'y') | length }}"
        "{% for t in tools recursive %}{{ t.name }}{{ loop(t.parts) }}{% endfor %}"
        "{{ [1, 2] | map('string') | join(', ') }}"
    )
    messages = [{"role": "user", "content": "<a> x </a> " + "word " * 1000}] * 1000
    tools = [{"name": "f", "parts": [{"name": "g", "parts": []}]}] * 100
    rendered = ChatTemplate(source).render(messages, tools=tools)
    assert rendered.startswith("<user>1word word") and rendered.endswith("fg" * 100 + "1, 2")
    assert "  1<user>1word" in rendered


@pytest.mark.parametrize("name", sorted(RESERVED_KWARGS))
def test_further_variables_do_not_replace_the_templates_own(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"chat_template_kwargs has '{name}'"):
        checked_kwargs({"enable_thinking": False, name: []})
    assert ChatTemplate("{{ messages | length }}").render([USER], kwargs={"messages": []}) == "1"


@pytest.mark.parametrize("value", [object(), float, "x" * 5000])
def test_further_variables_are_json_of_a_few_kilobytes(value: object) -> None:
    with pytest.raises(InvalidParameter, match="chat_template_kwargs"):
        checked_kwargs({"a": value})


def test_a_models_template_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was compiled to see whether it can be used, and again to be used."""
    compiled, sources = TemplateSandbox.compiled, list[str]()

    def counted(self: TemplateSandbox, source: str) -> Any:
        sources.append(source)
        return compiled(self, source)

    monkeypatch.setattr(TemplateSandbox, "compiled", counted)
    tokenizer = gzip.decompress((DATA / "tokenizers" / "smollm2.json.gz").read_bytes()).decode()
    for template in (CHATML, "{% for"):
        artifact: Any = fake_artifact(tokenizer, template, vocab_size=50_000, bos_token_id=1, eos_token_id=2)
        made = Prompts(artifact, clock=time.monotonic)
        assert (made.chat_template is None) == (template != CHATML)
    assert sources == [CHATML, "{% for"]
