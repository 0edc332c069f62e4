"""What is routed by: texts that begin alike where prompts do, in the namespace of whoever sends them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from radixlm.runtime.cache.cache_namespace import CacheNamespaces, ModelIdentity
from radixlm.runtime.extras.ray.prefix_router import MAX_BODY_BYTES, RoutedPrompt

NAMESPACES = CacheNamespaces(ModelIdentity(), b"secret")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["role", "content", "text", "x"]), inner),
    max_leaves=8,
)
FIELDS = ("messages", "prompt", "input", "instructions", "system", "tools", "cache_salt", "prompt_cache_key")


def routed(body: dict[str, Any], key: str | None = None) -> RoutedPrompt:
    return RoutedPrompt.of(json.dumps(body).encode(), key, NAMESPACES)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def test_the_next_turn_begins_as_the_last_one_did() -> None:
    first, second = (routed({"messages": said(*texts)}) for texts in (("Hi",), ("Hi", "Hello!", "Who are you?")))
    assert second.text.startswith(first.text) and first.text
    assert second.namespace == first.namespace


def test_parts_of_a_message_are_its_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert routed({"messages": [{"role": "user", "content": parts}]}) == routed({"messages": said("Hi")})


def test_the_system_of_anthropics_bodies_comes_first_without_its_billing_line() -> None:
    def asked(*texts: str) -> RoutedPrompt:
        return routed({"system": [{"type": "text", "text": text} for text in texts], "messages": said("Hi")})

    chat = routed({"messages": [{"role": "system", "content": "Be brief."}, *said("Hi")]})
    assert asked("Be ", "brief.") == chat == routed({"system": "Be brief.", "messages": said("Hi")})
    assert asked("x-anthropic-billing-header: cch=1;", "Be brief.") == chat
    assert asked("Be brief.", "x-anthropic-billing-header: cch=1;") != chat


def test_what_else_a_client_sends_does_not_matter() -> None:
    assert routed({"messages": said("Hi"), "temperature": 0.5, "user": "me"}) == routed({"messages": said("Hi")})


def test_a_request_whose_match_is_off_may_go_anywhere_and_leaves_no_text() -> None:
    assert routed({"messages": said("Hi"), "cache_match": "off"}) == RoutedPrompt()


def test_where_the_engines_match_is_off_only_what_a_request_asks_to_match_leaves_text() -> None:
    """The router kept every prompt's digests where its engines kept nothing."""

    def routed_off(**more: Any) -> RoutedPrompt:
        body = json.dumps({"messages": said("Hi"), **more}).encode()
        return RoutedPrompt.of(body, None, NAMESPACES, match="off")

    assert routed_off() == routed_off(cache_match=None) == RoutedPrompt()
    assert routed_off(cache_match="text") == routed({"messages": said("Hi")})


def test_roles_and_borders_of_messages_do() -> None:
    texts = {routed({"messages": said(*told)}).text for told in (("ab", "c"), ("a", "bc"), ("abc",))}
    assert len(texts | {routed({"prompt": "abc"}).text}) == 4


def test_token_ids_and_texts_are_prompts_too() -> None:
    assert routed({"prompt": [1, 2, 3, 4]}).text.startswith(routed({"prompt": [1, 2, 3]}).text)
    assert routed({"prompt": [12]}).text != routed({"prompt": [1, 2]}).text
    assert routed({"prompt": "Once upon"}).text.startswith(routed({"prompt": "Once"}).text)


def test_keys_salts_and_cache_keys_set_namespaces_apart() -> None:
    namespaces = [
        routed({"prompt": "x"}),
        routed({"prompt": "x"}, "alice"),
        routed({"prompt": "x"}, "bob"),
        routed({"prompt": "x", "cache_salt": "alice"}),
        routed({"prompt": "x", "prompt_cache_key": "alice"}),
    ]
    assert len({one.namespace for one in namespaces}) == 5
    assert {one.text for one in namespaces} == {b"x"}


@settings(suppress_health_check=[HealthCheck.too_slow])  # of a machine that is busy with other tests
@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_body_can_be_routed(body: dict[str, Any]) -> None:
    assert isinstance(routed(body).text, bytes)


@given(st.binary())
def test_what_is_no_json_may_go_anywhere(body: bytes) -> None:
    assert isinstance(RoutedPrompt.of(body, None, NAMESPACES), RoutedPrompt)


def test_deep_json_and_lone_surrogates_may_too() -> None:
    assert RoutedPrompt.of(b"[" * 100_000, None, NAMESPACES) == RoutedPrompt()
    assert RoutedPrompt.of(b'{"prompt": "\\ud800"}', None, NAMESPACES) == RoutedPrompt()
    assert routed({"prompt": "x", "cache_salt": "y" * 5000}) == RoutedPrompt()


def test_only_the_beginning_of_a_long_prompt_is_written_down() -> None:
    """A million token ids took a second of the loop that all clients share."""
    routed = RoutedPrompt.of(json.dumps({"prompt": [7] * 1000}).encode(), None, NAMESPACES, 64)
    assert routed.text == b"7\0" * 32
    assert (
        RoutedPrompt.of(json.dumps({"prompt": "é" * 100}).encode(), None, NAMESPACES, 65).text
        == "é".encode() * 32 + b"\xc3"
    )


def test_a_body_longer_than_any_context_may_go_anywhere() -> None:
    assert RoutedPrompt.of(b'{"prompt": "%b"}' % (b"x" * MAX_BODY_BYTES), "key", NAMESPACES) == RoutedPrompt()
