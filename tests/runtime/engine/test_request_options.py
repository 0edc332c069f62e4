"""Options are changed where they differ, and checked when they are."""

from __future__ import annotations

import pytest
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.errors import InvalidParameter


def test_options_that_stay_what_they_are_are_not_checked_again() -> None:
    options = RequestOptions(namespace=b"one", request_id="mine")
    assert options.changed(constraint=None, namespace=options.namespace) is options


def test_what_is_changed_is_checked_and_the_rest_stays() -> None:
    options = RequestOptions(namespace=b"one")
    assert options.changed(strip_suffix=False) == RequestOptions(namespace=b"one", strip_suffix=False)
    with pytest.raises(InvalidParameter, match="request_id"):
        options.changed(request_id="")


@pytest.mark.parametrize("namespace", ["text", 7, bytearray(b"one"), b"x" * 257])
def test_a_namespace_that_no_store_can_keep_is_refused(namespace: object) -> None:
    with pytest.raises(InvalidParameter, match="namespace"):
        RequestOptions(namespace=namespace)  # type: ignore[arg-type]
