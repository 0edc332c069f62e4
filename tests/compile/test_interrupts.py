"""A signal's exception survives code that turns it into a RuntimeError, as TVM does."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from radixlm.compile.interrupts import interrupts_kept


def test_ctrl_c_is_raised_where_tvm_made_a_runtime_error_of_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        _like_tvm()
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_is_itself_where_nothing_catches_it() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_that_a_destructor_lost_is_raised_at_the_next_check() -> None:
    """Python prints "Exception ignored in" and goes on."""

    class Dropped:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as check, catch_unraisable():
        del (dropped := [Dropped()])[0]
        reached.append(dropped)
        check()
        reached.append("not here")
    assert reached == [[]]


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="ours"), interrupts_kept():
        raise RuntimeError("ours")


def test_in_another_thread_nothing_is_changed() -> None:
    def run() -> None:
        with interrupts_kept():
            seen.append(signal.getsignal(signal.SIGINT))

    seen: list[object] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


@contextmanager
def catch_unraisable() -> Iterator[None]:
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before


def _like_tvm() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        raise RuntimeError(str(error)) from None
