"""Ctrl-C and SIGTERM: the first signal ends the run after the step in flight, the second one at once."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from absl import logging

# Ctrl-C so soon after one that an earlier run has taken means the program that repeats the run.
_SECOND_WITHIN_SECS = 2.0
# SIGTERM so soon after SIGTERM is the same one: systemd sends it to a launcher and to its child, to which the launcher
# passes it on.
_SAME_WITHIN_SECS = 0.1
# What Python does at each signal where the program has said nothing about it: only then it is ours.
_DEFAULTS: tuple[tuple[signal.Signals, Any], ...] = (
    (signal.SIGINT, signal.default_int_handler),  # The first: from then on nothing is raised before all are installed.
    (signal.SIGTERM, signal.SIG_DFL),
)
_EXIT_CODE = 128 + signal.SIGTERM


@final
class Interruptible:
    """While it is open, Ctrl-C and SIGTERM (preemption) set `requested` instead of breaking off a step.

    The outermost one, when it is closed after SIGTERM, exits with 143: what the run has to save and to close belongs
    inside. After Ctrl-C it just goes on. An exception on its way goes on too, after SIGTERM with a note.

    The second signal ends at once: Ctrl-C, also soon after one that an earlier run took, raises `KeyboardInterrupt`;
    SIGTERM, or one of each, ends the process as if nobody had handled it, without any `finally`. Python hears a signal
    between two of its instructions: not before a long compilation is done.

    Nested ones share the outermost one's answer, so an `OuterLoop` and its loops agree. Outside the main thread nothing
    is changed, nor for a signal that the program handles or ignores (as `nohup` has it) itself.

    >>> with Interruptible() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.requested, interrupt.signal_name
    (True, 'Ctrl-C')

    Args:
      clock: tells the time in seconds.
      defers: whether a signal that comes here is no more than `unconfirmed` until somebody calls `confirm`: in a job of
        many processes, when all know of it.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, defers: bool = False):
        self._clock, self._defers = clock, defers
        self._outer: Interruptible | None = None
        self._pid = 0
        self.signum: int | None = None  # The first signal.
        self.unconfirmed: int | None = None  # One that is not to be heeded yet.
        self._came_elsewhere: int | None = None  # Confirmed, and not come here.
        self._times: dict[int, float] = {}  # When each signal came last, also in an earlier run.
        # The handlers we took the place of, Python's and the C library's.
        self._before: dict[int, tuple[Any, Any]] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come since the outermost one was opened."""
        return self.signum is not None if self._outer is None else self._outer.requested

    @property
    def outermost(self) -> "Interruptible":
        """The one whose handlers are installed, this one or one around it; its `signum` is what has come first."""
        return self if self._outer is None else self._outer.outermost

    @property
    def signal_name(self) -> str | None:
        """What has come first, "Ctrl-C" or "SIGTERM"; None where nothing has."""
        if self._outer is not None:
            return self._outer.signal_name
        return {None: None, signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[self.signum]

    def confirm(self, signum: int) -> None:
        """Has this signal heeded from now on, wherever it has come.

        Where it comes here too, some time later, it is the same one: hosts of a cluster are not told at the same time.
        """
        if self.signum is None and self.unconfirmed != signum:
            self._came_elsewhere = signum
        self.signum, self.unconfirmed = self.signum or signum, None

    def __enter__(self) -> "Interruptible":
        self.signum = self.unconfirmed = self._came_elsewhere = None
        self._outer = _find_open()
        if self._outer is None and threading.current_thread() is threading.main_thread():
            self._pid = os.getpid()
            for signum, default in _DEFAULTS:
                if signal.getsignal(signum) is default:
                    self._before[signum] = (default, _native_action(signum))
                    signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._put_back()
        if self._outer is None and signal.SIGTERM in (self.signum, self.unconfirmed):
            if error is None:
                raise SystemExit(_EXIT_CODE)
            error.add_note(f"SIGTERM had come: without this error the process would have exited with {_EXIT_CODE}")

    def _on_signal(self, signum: int, frame: Any) -> None:
        is_worker = os.getpid() != self._pid  # Forked during the run: `Process.terminate()` shall end it.
        if is_worker and signum == signal.SIGTERM:
            _end_at_once(signum)
        first, now = self.signum or self.unconfirmed, self._clock()
        since = now - self._times.get(signum, float("-inf"))
        if first == signum == signal.SIGTERM and since < _SAME_WITHIN_SECS:
            return
        if signum == self._came_elsewhere:
            self._came_elsewhere, self._times[signum] = None, now
            return
        # A program may repeat a short run, and swallow one request after the other.
        is_repeated = signum == signal.SIGINT and since < _SECOND_WITHIN_SECS
        self._times[signum] = now
        if self._defers and self.signum is None:
            self.unconfirmed = first or signum
        else:
            self.signum = first or signum
        # Nothing to put back: we are closed, and somebody else has put our handler back.
        if first is not None or is_repeated or not self._before:
            self._put_back()  # Here, for `KeyboardInterrupt` may be raised on the way into `__exit__`.
            if signum == signal.SIGINT and first != signal.SIGTERM:
                raise KeyboardInterrupt
            _end_at_once(signum)
        if not is_worker:
            self._log(signum)

    def _log(self, signum: int) -> None:
        with contextlib.suppress(RuntimeError):  # "reentrant call": it has come amid a write to the same stream.
            if signum == signal.SIGINT:
                logging.warning("Interrupted: the run ends after this step. Press Ctrl-C again to end it at once.")
            else:
                logging.warning(
                    "SIGTERM: the run ends after this step, saves and exits with %d. A second one ends it at once.",
                    _EXIT_CODE,
                )

    def _put_back(self) -> None:
        for signum, (handler, action) in list(self._before.items()):
            # `signal.signal` first calls handlers that are due, and so may come here again.
            if signal.getsignal(signum) == self._on_signal:  # Else it is somebody else's by now.
                signal.signal(signum, handler)
                _set_native_action(signum, action)
            self._before.pop(signum, None)


def _find_open() -> Interruptible | None:
    """The outermost one, if there is one: it has a handler."""
    for signum, _ in _DEFAULTS:
        owner = getattr(signal.getsignal(signum), "__self__", None)
        if isinstance(owner, Interruptible) and owner._before:
            return owner
    return None


def _end_at_once(signum: int) -> None:
    """Ends the process by the signal's default action, which nothing can swallow or delay."""
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)
    os._exit(128 + signum)  # The first process of a container outlives it.


# Python does not tell of a handler that native code has installed, as `jax.distributed.initialize` does for SIGTERM.


def _sigaction() -> Any:
    try:
        return ctypes.CDLL(None).sigaction
    except (TypeError, OSError, AttributeError):  # Windows.
        return None


def _native_action(signum: int) -> Any:
    """How the C library handles a signal now, in a form of its own."""
    sigaction, action = _sigaction(), ctypes.create_string_buffer(1024)
    return action if sigaction is not None and sigaction(signum, None, action) == 0 else None


def _set_native_action(signum: int, action: Any) -> None:
    if action is not None:
        _sigaction()(signum, action, None)
