"""Signal handling: the first Ctrl-C or SIGTERM ends the run after the current step, and the second ends it immediately.

Other threads can also end a run, or pause it between two steps.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any, final

from absl import logging

# A Ctrl-C this soon after one that ended an earlier run is meant to stop the program, which keeps starting runs.
_SECOND_WITHIN_SECS = 2.0
# A second SIGTERM this soon after the first counts as the same one: `timeout` sends it to its child twice, and under
# systemd, a launcher may forward a signal that its child has already received.
_SAME_WITHIN_SECS = 0.1
# Python's default handlers. jaxloop handles a signal only if the program has not replaced its default handler.
_DEFAULTS: tuple[tuple[signal.Signals, Any], ...] = (
    (signal.SIGINT, signal.default_int_handler),  # First, so that nothing is raised before all handlers are set.
    (signal.SIGTERM, signal.SIG_DFL),
)
_EXIT_CODE = 128 + signal.SIGTERM
# Requests that are not signals. Their numbers are smaller, because in a job the largest number is confirmed.
_PAUSE = 1
STOP = -1
"""The number to pass to `Interruptible.confirm` to end a run, as Ctrl-C does."""
_NO_SIGNALS = (None, STOP)
_CLOSED = 0  # Sent to the watch thread. No signal has this number.


@final
class Interruptible:
    """A context in which Ctrl-C and SIGTERM (preemption) set `requested` instead of interrupting a step.

    If the first signal is SIGTERM, the process exits with code 143 when the outermost context closes, so save and close
    everything inside the context. If the first signal is Ctrl-C, the program continues after the context. Exceptions
    propagate, but after SIGTERM, a note is added to them. From the first signal until the outermost context closes, the
    program's own SIGCHLD handler is not called.

    The second signal ends the process immediately, with exit code 128 plus the signal's number. This works even if the
    main thread hangs in native code, because another thread watches for signals. No `finally` blocks run, and the child
    processes of `multiprocessing` are killed. In an interactive session, and in a program that uses
    `signal.set_wakeup_fd`, no thread watches for signals. The second signal then has Python's default effect: Ctrl-C
    raises `KeyboardInterrupt`. If a run was ended by Ctrl-C less than 2 s ago, another Ctrl-C also raises
    `KeyboardInterrupt`.

    Saved checkpoints stay intact in all cases.

    Nested contexts share the state of the outermost one, so an `OuterLoop` and its loops receive the same signals. The
    context has no effect outside the main thread, or on a signal that the program already handles or ignores (as under
    `nohup`).

    >>> with Interruptible() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.requested, interrupt.signal_name
    (True, 'Ctrl-C')

    Args:
      defers: Whether a signal takes effect only when `confirm` is called. A multi-process job confirms a signal once
        all processes know about it.
    """

    def __init__(self, *, defers: bool = False):
        self._defers = defers
        self._outer: Interruptible | None = None
        self.signum: int | None = None  # The first signal.
        self.unconfirmed: int | None = None  # A signal that has no effect yet.
        self.pauses: bool = False  # True if the run pauses after the current dispatch.
        self._pause_is_unconfirmed = False
        self._last_ctrl_c = float("-inf")  # When the last Ctrl-C ended a run: this one or an earlier one.
        self._replaced: dict[int, tuple[Any, Any]] = {}  # The program's handlers, and their replacements.
        self._watch: _Watch | None = None

    @property
    def requested(self) -> bool:
        """True if a signal or another stop request has taken effect since the outermost context was opened."""
        return self.signum is not None if self._outer is None else self._outer.requested

    @property
    def outermost(self) -> "Interruptible":
        """The outermost enclosing context, or this context if there is none.

        The `signum` of the outermost context is the number of the first signal that took effect. If only a stop request
        took effect, `signum` is `STOP`.
        """
        return self if self._outer is None else self._outer.outermost

    @property
    def signal_name(self) -> str | None:
        """The name of the first signal or stop request: "Ctrl-C", "SIGTERM" or "a command"; None if there was none."""
        if self._outer is not None:
            return self._outer.signal_name
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", STOP: "a command"}
        return None if self.signum is None else names[self.signum]

    @property
    def reason(self) -> str | None:
        """The reason for an interruption: "Ctrl-C", "SIGTERM" or "stopped by a command", or None if there was none."""
        return "stopped by a command" if self.signum == STOP else self.signal_name

    def run_status(self, error: BaseException | None) -> str:
        """Returns the status of a run that has ended: "failed", "killed" (by a signal) or "finished".

        `error` is the exception that ended the run, or None if there was none.
        """
        if isinstance(error, Exception | SystemExit):
            return "failed"
        return "finished" if error is None and self.outermost.signum in _NO_SIGNALS else "killed"

    def supersedes(self, error: BaseException) -> bool:
        """Returns True if a signal had already arrived when the dataset raised the given error. If so, logs the error.

        A signal to a process group also ends the worker processes of a data loader. The resulting error must not hide
        the signal.
        """
        is_caused = isinstance(error, Exception) and self.outermost.signum not in _NO_SIGNALS
        if is_caused:
            logging.warning("The data failed after %s, which may have ended their workers: %r", self.signal_name, error)
        return is_caused

    def request_pause(self) -> None:
        """Makes the run pause after the current dispatch. May be called from any thread."""
        if self._defers:
            self._pause_is_unconfirmed = True
        else:
            self.pauses = True

    def end_pause(self) -> None:
        """Ends a pause, or cancels a requested pause."""
        self.pauses = self._pause_is_unconfirmed = False

    @property
    def to_confirm(self) -> int:
        """The number of the unconfirmed signal, 1 for an unconfirmed pause request, or 0 if there is neither.

        This process has received the signal or request, but it takes effect only when `confirm` is called, once all
        processes know about it.
        """
        return self.unconfirmed or (_PAUSE if self._pause_is_unconfirmed else 0)

    def confirm(self, signum: int) -> None:
        """Puts a signal or request into effect, no matter which process of the job received it.

        The hosts of a cluster may receive a signal at different times. If a signal reaches this process only after the
        processes have confirmed it, it still counts as the first signal, not as a second one.
        """
        if signum == _PAUSE:
            self.pauses, self._pause_is_unconfirmed = True, False
            return
        if signum in _NO_SIGNALS:
            self.signum = self.signum or signum
            return
        if self.signum in _NO_SIGNALS:
            self.signum = signum
        self.unconfirmed = None

    def __enter__(self) -> "Interruptible":
        self.signum = self.unconfirmed = None
        self.end_pause()
        self._outer = _find_open() or getattr(_current, "outermost", None)
        if self._outer is None:
            _current.outermost = self
        if self._outer is None and threading.current_thread() is threading.main_thread():
            for signum, default in _DEFAULTS:
                if signal.getsignal(signum) is default:
                    self._replaced[signum] = default, self._on_signal
                    _set_handler(signum, self._on_signal)
            if self._replaced and not hasattr(sys, "ps1"):
                self._watch = _Watch.begin(frozenset(self._replaced))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore_handlers()
        if self._outer is None:
            _current.outermost = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        if self._outer is None and signal.SIGTERM in (self.signum, self.unconfirmed):
            if error is None:
                raise SystemExit(_EXIT_CODE)
            error.add_note(
                f"SIGTERM was received. Without this error, the process would have exited with {_EXIT_CODE}."
            )

    def _on_signal(self, signum: int, frame: Any) -> None:
        is_first, is_repeated = self.signum in _NO_SIGNALS and self.unconfirmed is None, False
        if is_first and signum == signal.SIGINT:
            # A program may start one short run after another, and each would swallow one Ctrl-C.
            now = time.monotonic()
            is_repeated, self._last_ctrl_c = now - self._last_ctrl_c < _SECOND_WITHIN_SECS, now
        if is_repeated or not (is_first or self._watch):
            self._restore_handlers()
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            signal.raise_signal(signum)
        elif is_first:
            if self._defers:
                self.unconfirmed = signum
            else:
                self.signum = signum
            _announce(signum)
            # PyTorch's handler raises in the main thread if a worker has ended, and the signal may have ended workers.
            if callable(theirs := signal.getsignal(signal.SIGCHLD)):
                self._replaced[signal.SIGCHLD] = theirs, signal.SIG_DFL
                _set_handler(signal.SIGCHLD, signal.SIG_DFL)

    def _restore_handlers(self) -> None:
        for signum, (theirs, ours) in list(self._replaced.items()):
            # `signal.signal` first calls the handlers of pending signals, which may call this method again.
            if signal.getsignal(signum) == ours:  # Otherwise, other code replaced the handler.
                signal.signal(signum, theirs)
            self._replaced.pop(signum, None)


def _set_handler(signum: int, handler: Any) -> None:
    with contextlib.suppress(Exception):  # `signal.signal` first calls the handlers of pending signals.
        signal.signal(signum, handler)
    signal.signal(signum, handler)


def _announce(signum: int) -> None:
    with contextlib.suppress(RuntimeError):  # "reentrant call": the signal interrupted a write to the same stream.
        if signum == signal.SIGINT:
            logging.warning("Ctrl-C: the run stops after this step. Press Ctrl-C again to stop it at once.")
        else:
            logging.warning(
                "SIGTERM: the run stops after this step, saves, and exits with %d. A second one ends it at once.",
                _EXIT_CODE,
            )


@final
class _Watch:
    """A thread that ends the process when the second signal arrives, even if the main thread hangs."""

    def __init__(self, signums: frozenset[int]):
        self._signums = signums
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    @classmethod
    def begin(cls, signums: frozenset[int]) -> "_Watch | None":
        """Starts and returns a watch. Returns None if other code has called `signal.set_wakeup_fd`, as asyncio does."""
        watch = cls(signums)
        # Python writes the number of each signal to the pipe when the signal arrives, before any handler runs.
        before = signal.set_wakeup_fd(watch._writer, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            watch._close()
            return None
        threading.Thread(target=watch._run, name="jaxloop-signals", daemon=True).start()
        return watch

    def end(self) -> None:
        """Stops the thread."""
        signal.set_wakeup_fd(-1)
        os.write(self._writer, bytes([_CLOSED]))  # The thread then closes the pipe.

    def _close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    def _run(self) -> None:
        first, arrived = 0, 0.0
        while (signum := os.read(self._reader, 1)[0]) != _CLOSED:
            now = time.monotonic()
            is_same = signum == first == signal.SIGTERM and now - arrived < _SAME_WITHIN_SECS
            if signum in self._signums and not is_same:
                if first:
                    _exit_now(signum)
                first, arrived = signum, now
        self._close()


def _exit_now(signum: int) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"jaxloop: the run did not end after Ctrl-C or SIGTERM. The process exits now.\n")
    with contextlib.suppress(Exception):  # There are no workers if this module was never imported.
        for worker in sys.modules["multiprocessing"].active_children():  # They may ignore other signals.
            worker.kill()
    os._exit(128 + signum)


_current = threading.local()


def _find_open() -> Interruptible | None:
    """Returns the open context whose signal handlers are installed, or None if there is no such context."""
    for signum, _ in _DEFAULTS:
        owner = getattr(signal.getsignal(signum), "__self__", None)
        if isinstance(owner, Interruptible) and owner._replaced:
            return owner
    return None


def _detach_worker() -> None:
    """Resets the signal handling in a forked worker process, so that `Process.terminate` can end it.

    Otherwise, signals to the worker would reach the watch thread of the parent process.
    """
    parent = _find_open()
    if parent is not None:
        if parent._watch is not None:
            signal.set_wakeup_fd(-1)
            parent._watch = None
        # The parent still needs its workers until the run ends, and Ctrl-C reaches the workers, too.
        for signum, handler in ((signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL)):
            if signum in parent._replaced:
                signal.signal(signum, handler)


os.register_at_fork(after_in_child=_detach_worker)
