"""Ctrl-C: the first one ends the run after the step in flight, the second one at once."""

import signal
import threading
from typing import Any

from absl import logging


class Interruptible:
    """While it is open, Ctrl-C sets `requested` instead of raising in the middle of a step.

    Nested ones share the outermost one's answer, so an `OuterLoop` and its loops agree. Outside the main thread,
    or where the program has a SIGINT handler of its own, it changes nothing and is never requested.

    >>> with Interruptible() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.requested
    True
    """

    def __init__(self):
        self._outer: Interruptible | None = None
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
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        logging.warning("Interrupted: the run ends after this step. Press Ctrl-C again to end it at once.")
