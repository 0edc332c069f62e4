"""A long prompt is seen in the log while it is computed, and counted even if its client leaves before its end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from radixlm.runtime.server import prefill_log

from .real_server import real_server, wait_until

LONG = {"messages": [{"role": "user", "content": "once there was a man " * 8}], "max_tokens": 2}


def _lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [each.fields for each in caplog.records if each.name == "radixlm.requests"]  # type: ignore[attr-defined]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(prefill_log, "FIRST_S", 0.05)
    monkeypatch.setattr(prefill_log, "INTERVAL_S", 0.05)
    caplog.set_level(logging.INFO, "radixlm.requests")
    return caplog


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}])
def test_a_long_prompt_has_lines_that_count_up_until_it_is_computed(
    often: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    with real_server(max_num_batched_tokens=16) as server:
        server.model.step_s = 0.4
        server.chat(**LONG, **fields).read()
        wait_until(lambda: "status" in _lines(often)[-1])
        *during, end = _lines(often)
        prefill = [each for each in during if each["state"] == "prefill"]
        assert len(prefill) >= 2 and {each["id"] for each in during} == {end["id"]}
        done = [each["prefilled_tokens"] for each in prefill]
        assert done == sorted(done) and done[0] < done[-1] <= end["prompt_tokens"]
        assert {each["prompt_tokens"] for each in prefill} == {end["prompt_tokens"]}
        assert any("left_s" in each for each in prefill)


def test_a_prompt_that_takes_no_time_has_one_line(
    often: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_log, "FIRST_S", 20.0)
    with real_server() as server:
        server.chat(**LONG)
        wait_until(lambda: bool(_lines(often)))
        assert ["state" in each for each in _lines(often)] == [False]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_who_leaves_before_the_first_token_is_499_with_counts(
    often: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    """It was status 200 without a count."""
    with real_server(max_num_batched_tokens=16) as server:
        server.model.step_s = 1.0
        connection = server.send(**LONG, **fields)
        wait_until(lambda: any(each.get("prefilled_tokens", 0) > 0 for each in _lines(often)))
        connection.close()
        wait_until(lambda: "status" in _lines(often)[-1])
        end = _lines(often)[-1]
        assert (end["status"], end["error"]) == (499, "client_gone") and end["prompt_tokens"] > 32
        server.check()
