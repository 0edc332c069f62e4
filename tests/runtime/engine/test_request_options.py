"""Options are changed where they differ, and checked when they are."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.cache_namespace import adapted_namespace
from radixlm.runtime.engine.request_options import RequestOptions
from radixlm.runtime.errors import InvalidArgument, InvalidParameter
from radixlm.runtime.lora.adapters import Adapter


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


def test_only_the_engine_sets_the_namespace_of_an_adapter() -> None:
    adapter, namespace = Adapter("a", "digest", 0), adapted_namespace(b"one", "digest")
    options = RequestOptions(namespace=b"one", lora="a")
    assert options.changed(lora=adapter, namespace=namespace).adapter_index == 0
    for lora in (None, "a"):
        with pytest.raises(InvalidParameter, match="begins like one of a LoRA adapter"):
            RequestOptions(namespace=namespace, lora=lora)
    with pytest.raises(InvalidArgument, match="it must be the name of an adapter"):
        RequestOptions(namespace=b"one", lora=adapter)
