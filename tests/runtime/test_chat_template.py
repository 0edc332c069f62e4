"""Chat templates render as in transformers, and nothing in one gets out of its sandbox."""

from __future__ import annotations

import pytest
from radixlm.runtime import chat_template
from radixlm.runtime.chat_template import MAX_TEMPLATE_LENGTH, ChatTemplate
from radixlm.runtime.errors import InvalidRequest

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


def test_what_the_template_raises_is_the_message_of_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages: roles must alternate"):
        ChatTemplate(LLAMA2).render([USER, USER])


def test_tojson_is_not_escaped_for_html_and_takes_indent() -> None:
    assert ChatTemplate("{{ {'a': '<é>'} | tojson }}").render([]) == '{"a": "<é>"}'
    assert ChatTemplate("{{ [1] | tojson(indent=2) }}").render([]) == "[\n  1\n]"


def test_loop_controls_and_block_trimming_are_those_of_transformers() -> None:
    source = "{% for i in range(9) %}\n  {% if i == 2 %}\n  {% break %}\n  {% endif %}\n{{ i }}\n{% endfor %}"
    assert ChatTemplate(source).render([]) == "0\n1\n"


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
