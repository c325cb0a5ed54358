"""Ctrl-C and SIGTERM: the first signal ends the run after the step in flight, the second one ends it in any case."""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
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
# How long the second signal leaves for cleanup, and how long a job of several processes has to agree on the first one.
_CLEANUP_SECS = 5.0
_AGREEMENT_SECS = 15.0
_CLOSED = 0  # Sent to the thread that watches; no signal has this number.


@final
class Interruptible:
    """While it is open, Ctrl-C and SIGTERM (preemption) set `requested` instead of breaking off a step.

    The outermost one, when it is closed after SIGTERM, exits with 143: what the run has to save and to close belongs
    inside. After Ctrl-C it just goes on. An exception on its way goes on too, after SIGTERM with a note.

    The second signal ends the run: Ctrl-C, also soon after one that an earlier run took, raises `KeyboardInterrupt`;
    SIGTERM, or one of each, ends the process as if nobody had handled it, without any `finally`, and kills what
    `multiprocessing` has started. Python handles a signal between two of its instructions, and a program may
    swallow `KeyboardInterrupt`, so a thread watches: if the run has not ended 5 s after the second signal, or at the
    third, it exits with 128 + the signal's number. In an interactive session nothing but `KeyboardInterrupt` happens.

    Where a job of many processes has not agreed on a first signal after 15 s, because one of them hangs, the process
    exits likewise. What is saved stays intact in each case.

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
        self._watch: _Watch | None = None

    @property
    def awaits_agreement(self) -> bool:
        """Whether a signal has come, or may have come unseen, that not all processes of the job know of."""
        return self._defers and self.signum is None

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
            if self._before and not hasattr(sys, "ps1"):
                self._watch = _Watch.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._put_back()
        if self._watch is not None:
            self._watch.end()
            self._watch = None
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
            _kill_workers()
            _end_at_once(signum)
        if not is_worker:
            self._log(signum)

    def _log(self, signum: int) -> None:
        with contextlib.suppress(RuntimeError):  # "reentrant call": it has come amid a write to the same stream.
            if signum == signal.SIGINT:
                logging.warning("Ctrl-C: the run stops after this step. Press Ctrl-C again to stop it at once.")
            else:
                logging.warning(
                    "SIGTERM: the run stops after this step, saves, and exits with %d. A second one ends it at once.",
                    _EXIT_CODE,
                )

    def _put_back(self) -> None:
        for signum, (handler, action) in list(self._before.items()):
            # `signal.signal` first calls handlers that are due, and so may come here again.
            if signal.getsignal(signum) == self._on_signal:  # Else it is somebody else's by now.
                signal.signal(signum, handler)
                _set_native_action(signum, action)
            self._before.pop(signum, None)


@final
class _Watch:
    """A thread that ends the process where a run does not end after signals, whatever the main thread is doing."""

    def __init__(self, interruptible: Interruptible):
        self._interruptible, self._pid = interruptible, os.getpid()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    @classmethod
    def begin(cls, interruptible: Interruptible) -> "_Watch | None":
        """Begins to watch; None where the program itself is told of signals in this way, as asyncio is."""
        watch = cls(interruptible)
        # Python writes the number of each signal there as it comes, before any handler runs.
        before = signal.set_wakeup_fd(watch._writer, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            watch._close()
            return None
        threading.Thread(target=watch._run, name="jaxloop-signals", daemon=True).start()
        return watch

    def end(self) -> None:
        """Stops watching."""
        if os.getpid() != self._pid:  # The thread is that of the process from which this one was forked.
            return
        if signal.set_wakeup_fd(-1) not in (-1, self._writer):
            logging.warning("A signal.set_wakeup_fd of the program during a run is undone.")
        os.write(self._writer, bytes([_CLOSED]))  # Not to the thread alone: it closes the pipe.

    def _close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        number, last, deadline = 0, (0, 0.0), float("inf")
        while True:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._reader], [], [], None if left == float("inf") else left)[0]
            if not ready:
                if number > 1 or self._interruptible.awaits_agreement:
                    _exit_now(last[0])
                deadline = float("inf")
                continue
            for signum in os.read(self._reader, 1024):
                if signum == _CLOSED:
                    self._close()
                    return
                now = time.monotonic()
                is_same = signum == last[0] == signal.SIGTERM and now - last[1] < _SAME_WITHIN_SECS
                if signum not in (signal.SIGINT, signal.SIGTERM) or is_same:
                    continue
                number, last = number + 1, (signum, now)
                deadline = min(deadline, now + (_AGREEMENT_SECS if number == 1 else _CLEANUP_SECS))
                if number > 2:
                    _exit_now(signum)


def _exit_now(signum: int) -> None:
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    text = "jaxloop: the run has not ended after the signals that came. The process ends now.\n"
    with contextlib.suppress(OSError):
        os.write(2, ("\x1b[?25h\n" * is_terminal + text).encode())  # Shows the cursor, which a progress bar may hide.
    _kill_workers()
    os._exit(128 + signum)


def _kill_workers() -> None:
    """Kills what `multiprocessing` has started: workers may ignore signals, and outlive a process that is killed."""
    with contextlib.suppress(Exception):
        for worker in multiprocessing.active_children():
            worker.kill()


def _forget_watch() -> None:
    """In a forked process: signals that come there are not those of the process that watches."""
    open_ = _find_open()
    if open_ is not None and open_._watch is not None:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watch)


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
