"""Options of an engine are refused where they are given, not where they are used."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.errors import InvalidParameter


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_bytes": 4e6},
        {"store_bytes": 1e9},
        {"num_threads": "2"},
        {"num_threads": 1.5},
        {"max_queue": 1.5},
        {"max_num_seqs": True},
        {"cache_ttl_s": "5"},
        {"prefill_ms": "50"},
        {"kv_log_bytes": b"1"},
    ],
    ids=str,
)
def test_an_option_of_another_type_is_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidParameter, match=f"{name} is .*; it must be a"):
        EngineOptions(**options)


def test_whole_numbers_are_numbers() -> None:
    assert EngineOptions(prefill_ms=50, cache_ttl_s=5).prefill_ms == 50
