"""Handles Ctrl-C and SIGTERM: the first signal ends the run after the current step, and the second ends it immediately.

Other threads can also pause a run between two steps, or end it.
"""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any, final

from absl import logging

# A Ctrl-C this soon after one that ended an earlier run is meant to stop the program, which keeps starting runs.
_SECOND_WITHIN_SECS = 2.0
# A second SIGTERM this soon after the first counts as the same one: systemd sends SIGTERM to a launcher and to its
# child, and the launcher also forwards it to the child.
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
DETOUR = -2
"""The number to pass to `Interruptible.confirm` to interrupt a run so that it can return to an earlier checkpoint."""
_NO_SIGNALS = (None, STOP, DETOUR)
# The time for cleanup after the second signal, and the time within which a job must agree on the first one.
_CLEANUP_SECS = 5.0
_AGREEMENT_SECS = 15.0
_CLOSED = 0  # Sent to the watch thread. No signal has this number.


@final
class Interruptible:
    """A context in which Ctrl-C and SIGTERM (preemption) set `requested` instead of interrupting a step.

    If the first signal is SIGTERM, the process exits with code 143 when the outermost context closes, so save and close
    everything inside the context. If it is Ctrl-C, the program continues. Exceptions propagate; after SIGTERM, a note
    is added to them. From the first signal on, a SIGCHLD handler of the program isn't called.

    A second Ctrl-C raises `KeyboardInterrupt`, even if the first one ended an earlier run a moment ago. If at least one
    of the two signals is SIGTERM, the second one ends the process by its default action: no `finally` blocks run, and
    the child processes of `multiprocessing` are killed. However, Python handles signals only between bytecode
    instructions, and a program may swallow `KeyboardInterrupt`. Therefore, a thread also watches for signals: 5 s after
    the second signal, or at the third, it ends the process with exit code 128 + the signal's number. Interactive
    sessions don't start this thread.

    If the processes of a job have not agreed on the first signal after 15 s, because one of them hangs, the process
    exits in the same way. Saved checkpoints stay intact in all cases.

    Nested contexts share the state of the outermost one, so an `OuterLoop` and its loops agree. The context has no
    effect outside the main thread, or on a signal that the program already handles or ignores (as under `nohup`).

    >>> with Interruptible() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    ...     interrupt.requested, interrupt.signal_name
    (True, 'Ctrl-C')

    Args:
      defers: Whether a signal remains `unconfirmed` until `confirm` is called. A multi-process job confirms a signal
        once all processes know about it.
    """

    def __init__(self, *, defers: bool = False):
        self._defers = defers
        self._outer: Interruptible | None = None
        self._pid = 0
        self.signum: int | None = None  # The first signal.
        self.unconfirmed: int | None = None  # A signal that has no effect yet.
        self._confirmed_elsewhere: int | None = None  # A confirmed signal that this process has not received.
        self.pauses: bool = False  # True if the run pauses after the current dispatch.
        self._pause_is_unconfirmed = False
        self._times: dict[int, float] = {}  # When each signal last arrived, in this run or an earlier one.
        self._before: dict[int, tuple[Any, Any]] = {}  # The replaced handlers of Python and of the C library.
        self._child_handler: Any = None  # The program's SIGCHLD handler, while it isn't called.
        self._watch: _Watch | None = None

    @property
    def awaits_agreement(self) -> bool:
        """True if signals must be confirmed and none has been confirmed yet."""
        return self._defers and self.signum in _NO_SIGNALS

    @property
    def requested(self) -> bool:
        """True if a signal has arrived since the outermost context was opened."""
        return self.signum is not None if self._outer is None else self._outer.requested

    @property
    def outermost(self) -> "Interruptible":
        """The context whose handlers are installed: either this one or one that encloses it.

        Its `signum` is the first signal.
        """
        return self if self._outer is None else self._outer.outermost

    @property
    def signal_name(self) -> str | None:
        """The name of the first signal or request, such as "Ctrl-C" or "a command"; None if there was none."""
        if self._outer is not None:
            return self._outer.signal_name
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", STOP: "a command", DETOUR: "a detour"}
        return None if self.signum is None else names[self.signum]

    @property
    def reason(self) -> str | None:
        """The reason a run ends: "Ctrl-C", "SIGTERM" or "stopped by a command"; None if it was not interrupted."""
        return "stopped by a command" if self.signum == STOP else self.signal_name

    def run_status(self, error: BaseException | None) -> str:
        """Returns how a run ended: "failed", "killed" (by a signal) or "finished"."""
        if isinstance(error, Exception | SystemExit):
            return "failed"
        return "finished" if error is None and self.outermost.signum in _NO_SIGNALS else "killed"

    def supersedes(self, error: BaseException) -> bool:
        """Returns True if a signal arrived before the data raised this error, and logs the error.

        A signal to a process group also ends the worker processes of a data loader, whose error must not hide the
        signal.
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
        """Ends a pause, or withdraws the request for one."""
        self.pauses = self._pause_is_unconfirmed = False

    @property
    def to_confirm(self) -> int:
        """The request that the processes of a job still have to confirm; 0 if there is none."""
        return self.unconfirmed or (_PAUSE if self._pause_is_unconfirmed else 0)

    def confirm(self, signum: int) -> None:
        """Puts a request into effect, no matter which process of the job received it.

        The hosts of a cluster may receive a signal at different times. If this process receives it later, it counts as
        the same signal.
        """
        if signum == _PAUSE:
            self.pauses, self._pause_is_unconfirmed = True, False
            return
        if signum in _NO_SIGNALS:
            self.signum = self.signum or signum
            return
        if self.signum in _NO_SIGNALS:
            if self.unconfirmed != signum:
                self._confirmed_elsewhere = signum
            self.signum = signum
        self.unconfirmed = None

    def end_detour(self) -> None:
        """Lets the run continue after `DETOUR`, unless a signal has arrived since then."""
        if self.signum == DETOUR:
            self.signum = None

    def __enter__(self) -> "Interruptible":
        self.signum = self.unconfirmed = self._confirmed_elsewhere = None
        self.end_pause()
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
        self._restore_handlers()
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
        is_worker = os.getpid() != self._pid  # Forked during the run; `Process.terminate()` must end it.
        if is_worker and signum == signal.SIGTERM:
            _end_at_once(signum)
        first, now = (None if self.signum in _NO_SIGNALS else self.signum) or self.unconfirmed, time.monotonic()
        since = now - self._times.get(signum, float("-inf"))
        if first == signum == signal.SIGTERM and since < _SAME_WITHIN_SECS:
            return
        if signum == self._confirmed_elsewhere:
            self._confirmed_elsewhere, self._times[signum] = None, now
            return
        # A program may start one short run after another, and each would swallow one Ctrl-C.
        is_repeated = signum == signal.SIGINT and since < _SECOND_WITHIN_SECS
        self._times[signum] = now
        if self._defers and self.signum in _NO_SIGNALS:
            self.unconfirmed = first or signum
        else:
            self.signum = first or signum
        # If `_before` is empty, the context is closed, and other code installed this handler again.
        if first is not None or is_repeated or not self._before:
            self._restore_handlers()  # Here, because `KeyboardInterrupt` may be raised before `__exit__` begins.
            if signum == signal.SIGINT and first != signal.SIGTERM:
                raise KeyboardInterrupt
            _kill_workers()
            _end_at_once(signum)
        if not is_worker:
            self._log(signum)
            self._ignore_children()

    def _log(self, signum: int) -> None:
        with contextlib.suppress(RuntimeError):  # "reentrant call": the signal interrupted a write to the same stream.
            if signum == signal.SIGINT:
                logging.warning("Ctrl-C: the run stops after this step. Press Ctrl-C again to stop it at once.")
            else:
                logging.warning(
                    "SIGTERM: the run stops after this step, saves, and exits with %d. A second one ends it at once.",
                    _EXIT_CODE,
                )

    def _ignore_children(self) -> None:
        """Replaces a SIGCHLD handler, such as that of PyTorch, which raises in the main thread if a worker has ended.

        The signal that ends the run may also have ended the workers.
        """
        if callable(handler := signal.getsignal(signal.SIGCHLD)):
            self._child_handler = handler
            with contextlib.suppress(Exception):  # `signal.signal` first calls the handlers of pending signals.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _restore_handlers(self) -> None:
        if self._child_handler is not None:
            signal.signal(signal.SIGCHLD, self._child_handler)
            self._child_handler = None
        for signum, (handler, action) in list(self._before.items()):
            # `signal.signal` first runs the handlers of pending signals, which may call this method again.
            if signal.getsignal(signum) == self._on_signal:  # Otherwise, other code replaced the handler.
                signal.signal(signum, handler)
                _set_native_action(signum, action)
            self._before.pop(signum, None)


@final
class _Watch:
    """A thread that ends the process if signals don't end the run, even if the main thread hangs."""

    def __init__(self, interruptible: Interruptible):
        self._interruptible, self._pid = interruptible, os.getpid()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    @classmethod
    def begin(cls, interruptible: Interruptible) -> "_Watch | None":
        """Starts the thread. Returns None if the program already uses the wakeup file descriptor, as asyncio does."""
        watch = cls(interruptible)
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
        if os.getpid() != self._pid:  # This process was forked, and the thread belongs to its parent.
            return
        if signal.set_wakeup_fd(-1) not in (-1, self._writer):
            logging.warning("The program called signal.set_wakeup_fd during the run, and jaxloop reset it to -1.")
        os.write(self._writer, bytes([_CLOSED]))  # The thread then closes the pipe.

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
    text = "jaxloop: the run did not end after Ctrl-C or SIGTERM. The process exits now.\n"
    with contextlib.suppress(OSError):
        os.write(2, ("\x1b[?25h\n" * is_terminal + text).encode())  # Shows the cursor, which a progress bar may hide.
    _kill_workers()
    os._exit(128 + signum)


def _kill_workers() -> None:
    """Kills the child processes of `multiprocessing`, which may ignore signals and may outlive this process."""
    with contextlib.suppress(Exception):
        for worker in multiprocessing.active_children():
            worker.kill()


def _forget_watch() -> None:
    """Detaches a forked child from its parent's watch thread, which would otherwise receive the child's signals."""
    open_ = _find_open()
    if open_ is not None and open_._watch is not None:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_watch)


def _find_open() -> Interruptible | None:
    """Returns the outermost open context, whose handlers are installed; None if there is none."""
    for signum, _ in _DEFAULTS:
        owner = getattr(signal.getsignal(signum), "__self__", None)
        if isinstance(owner, Interruptible) and owner._before:
            return owner
    return None


def _end_at_once(signum: int) -> None:
    """Ends the process with the signal's default action, which can't be swallowed or delayed."""
    signal.signal(signum, signal.SIG_DFL)
    signal.raise_signal(signum)
    os._exit(128 + signum)  # The default action doesn't end the first process of a container.


# Native code may install a handler that Python doesn't report, as `jax.distributed.initialize` does for SIGTERM.


def _sigaction() -> Any:
    try:
        return ctypes.CDLL(None).sigaction
    except (TypeError, OSError, AttributeError):  # Windows.
        return None


def _native_action(signum: int) -> Any:
    """Returns the C library's current `struct sigaction` for a signal."""
    sigaction, action = _sigaction(), ctypes.create_string_buffer(1024)
    return action if sigaction is not None and sigaction(signum, None, action) == 0 else None


def _set_native_action(signum: int, action: Any) -> None:
    if action is not None:
        _sigaction()(signum, action, None)
