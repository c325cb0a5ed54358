"""Ctrl-C: the first one ends the run after the step in flight, the second one at once."""

import signal
import threading
import time
from typing import Any

from absl import logging

_SECOND_WITHIN_SECS = 2.0


class Interruptible:
    """While it is open, Ctrl-C sets `requested` instead of raising in the middle of a step.

    A second Ctrl-C, while it is open or soon after the first, raises `KeyboardInterrupt` as usual.

    Nested ones share the outermost one's answer, so an `OuterLoop` and its loops agree. Outside the main thread,
    or where the program has a SIGINT handler of its own, it changes nothing and is never requested.

    >>> with Interruptible() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.requested
    True
    """

    def __init__(self):
        self._outer: Interruptible | None = None
        self._last_time = float("-inf")
        self._installed = False
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether Ctrl-C was pressed since the outermost one was opened."""
        return self._requested if self._outer is None else self._outer.requested

    def __enter__(self) -> "Interruptible":
        self._requested = False
        self._outer = None
        handler = signal.getsignal(signal.SIGINT)
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, Interruptible):
            self._outer = owner
        elif handler is signal.default_int_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._installed = False

    def _on_signal(self, signum: int, frame: Any) -> None:
        # A program may repeat a short run, and swallow one request after the other.
        is_second = self._requested or time.monotonic() - self._last_time < _SECOND_WITHIN_SECS
        self._requested, self._last_time = True, time.monotonic()
        if is_second:
            raise KeyboardInterrupt
        logging.warning("Interrupted: the run ends after this step. Press Ctrl-C again to end it at once.")
