import signal
import threading

import pytest

from jaxloop.interrupt import Interruptible


def test_the_first_ctrl_c_is_noted_and_the_second_raises():
    with Interruptible() as interrupt:
        assert not interrupt.requested
        signal.raise_signal(signal.SIGINT)
        assert interrupt.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nested_ones_share_the_answer():
    with Interruptible() as outer:
        with Interruptible() as inner:
            signal.raise_signal(signal.SIGINT)
            assert inner.requested
        assert outer.requested
        with Interruptible() as second:
            assert second.requested


def test_a_new_one_starts_afresh():
    interrupt = Interruptible()
    with interrupt:
        signal.raise_signal(signal.SIGINT)
    with interrupt:
        assert not interrupt.requested


def test_a_handler_of_the_program_is_left_alone():
    calls = []
    before = signal.signal(signal.SIGINT, lambda *_: calls.append(1))
    try:
        with Interruptible() as interrupt:
            signal.raise_signal(signal.SIGINT)
        assert calls == [1] and not interrupt.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_install_nothing():
    handlers = []

    def work():
        with Interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]
