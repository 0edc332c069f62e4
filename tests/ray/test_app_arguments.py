"""What `serve run ...extras.ray.ray_app:app NAME=VALUE...` takes; nothing is opened until it is deployed."""

from __future__ import annotations

import pytest
from radixlm.runtime.extras.ray.ray_app import app, engine_options, front_options
from ray.serve import Application


def test_an_artifact_is_enough() -> None:
    assert isinstance(app({"artifact": "a.radixlm"}), Application)


def test_every_option_of_the_engines_can_be_given() -> None:
    options = {"threads": "1", "kv_cache_gb": "0.5", "max_num_seqs": "8", "max_queue": "16", "num_cpus": "0.5"}
    options |= {"match": "off", "truncation": "middle"}
    assert isinstance(
        app({"artifact": "a.radixlm", "num_replicas": "3", "api_keys": "one,two", **options}), Application
    )


def test_a_queue_has_an_end_unless_asked_otherwise() -> None:
    assert engine_options({"artifact": "a"}) == {"max_queue": 256}
    assert engine_options({"artifact": "a", "max_queue": "9", "kv_cache_gb": "0.5", "match": "exact"}) == {
        "max_queue": 9,
        "match": "exact",
        "kv_cache_bytes": 500_000_000,
    }


def test_the_front_is_told_whom_it_answers() -> None:
    assert front_options({"artifact": "a"}) == {}
    assert front_options({"artifact": "a", "hosts": "gpu.example,10.0.0.7"}) == {"hosts": ("gpu.example", "10.0.0.7")}
    assert front_options({"artifact": "a", "hosts": "*"}) == {"hosts": ()}
    asked = {"artifact": "a", "api_keys": "one,two", "cors_origins": "https://a.example"}
    assert front_options(asked) == {"api_keys": ("one", "two"), "cors_origins": ("https://a.example",)}


@pytest.mark.parametrize("name", ["api_keys", "hosts", "cors_origins"])
def test_a_list_with_nothing_in_it_is_refused(name: str) -> None:
    """An empty list of keys opened the server."""
    for value in ("", ",", "a,"):
        with pytest.raises(ValueError, match=name):
            app({"artifact": "a.radixlm", name: value})


@pytest.mark.parametrize("arguments", [{}, {"num_replicas": "2"}, {"artifact": "a", "replicas": "2"}])
def test_what_is_missing_or_unknown_is_said(arguments: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="give artifact="):
        app(arguments)


def test_a_number_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="many"):
        app({"artifact": "a", "max_num_seqs": "many"})


def test_flags_of_serve_are_options_in_the_units_of_the_field() -> None:
    given = {"artifact": "a", "idle_work": "false", "prefill_ms": "20", "chat_template_kwargs": '{"a": 1}'}
    options = {"idle_work": False, "prefill_ms": 20.0, "template_kwargs": {"a": 1}, "max_queue": 256}
    assert engine_options(given) == options


@pytest.mark.parametrize("name", ["store", "kv_log", "log_kv", "draft"])
def test_what_is_one_processs_own_is_no_option_of_replicas(name: str) -> None:
    with pytest.raises(ValueError, match="give artifact="):
        engine_options({"artifact": "a", name: "x"})


@pytest.mark.parametrize(("name", "allowed"), [("match", "exact, seam, text, off"), ("truncation", "none, middle")])
def test_a_word_that_is_none_of_those_known_is_refused_with_them(name: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=? is 'on'; use one of {allowed}"):
        app({"artifact": "a", name: "on"})
