"""Many processes: how those of a job find each other, and how they end."""

import atexit
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax
from absl import logging

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "JAXLOOP_COORDINATOR", "JAXLOOP_NUM_PROCESSES", "JAXLOOP_PROCESS_ID"
"""The variables of the environment in which `python -m jaxloop.launch` says it to each process."""

EXIT_CODE_OF_FOLLOWER = 76
"""That of a process which ends because another one has failed."""


class ProcessError(RuntimeError):
    """Another process of the job has failed, and so this one can't go on."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    start_secs: int = 60,
    heartbeat_secs: int = 10,
    shutdown_secs: int = 15,
) -> None:
    """Joins the processes of a job; to be called first, before JAX does anything.

    Without arguments it finds the job by itself: under `python -m jaxloop.launch`, SLURM, Open MPI, on Cloud TPUs and
    Kubernetes, as `jax.distributed.initialize` does. Where there is none, the program goes on as the only process.

    From then on `jax.devices()` are those of all processes. An exception that nobody catches is printed with the number
    of its process, which ends at once; the others notice within `heartbeat_secs`, and end too.

    >>> initialize()  # doctest: +SKIP

    Args:
      coordinator_address: `host:port` of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      local_device_ids: the GPUs of this process; None for all of this machine.
      start_secs: how long to wait for the others to join.
      heartbeat_secs: after how long a process that says nothing is given up.
      shutdown_secs: how long a process that has ended well waits for the others.

    Raises:
      ValueError: some of the first three arguments are given, and not all.
      RuntimeError: JAX has started already; or the others did not join in time.
    """
    given = {"coordinator_address": coordinator_address, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        raise ValueError(f"initialize needs {', '.join(given)}, or none of them, got no {', '.join(missing)}.")
    if missing and COORDINATOR in os.environ:
        coordinator_address = os.environ[COORDINATOR]
        num_processes, process_id = int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS_ID])
    if _has_started():
        raise RuntimeError(
            "jaxloop.distributed.initialize() must be called before JAX does anything, and JAX has started already: an "
            "array was made, or jax.devices() called. Make it the first line of the program, after the imports."
        )
    jax.config.update("jax_enable_preemption_service", False)  # It would swallow SIGTERM, which ends a run well.
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids,
            initialization_timeout=start_secs,
            heartbeat_timeout_seconds=heartbeat_secs,
            shutdown_timeout_seconds=shutdown_secs,
        )
    except ValueError as error:
        if coordinator_address is None and "coordinator_address should be defined" in str(error):
            logging.info("No cluster was found: this is the only process.")
            return
        raise
    if jax.process_count() > 1:
        sys.excepthook = _end_at_once
    logging.info("Process %d of %d, with %d of %d devices.", *_place(), jax.local_device_count(), jax.device_count())


def is_first_process() -> bool:
    """Whether this process is the one that writes files which are there once: the only one, or number 0 of a job.

    >>> is_first_process()
    True
    """
    # To ask before JAX has started would start it.
    return not (jax.distributed.is_initialized() or _has_started()) or jax.process_index() == 0


def exit_without_waiting(error: SystemExit) -> None:
    """Has the program, which ends by an error that only this process met, not wait for the others at its end.

    They may wait for this one. Whoever ends well waits, see `shutdown_secs`.
    """

    def exit_now() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)

    if error.code not in (None, 0):
        atexit.register(exit_now)


def _has_started() -> bool:
    return jax._src.xla_bridge.backends_are_initialized()  # pyright: ignore


def _place() -> tuple[int, int]:
    return jax.process_index(), jax.process_count()


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Prints an exception and ends the process. Else it would wait for the others, and they for it."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    sys.stdout.flush()
    sys.stderr.write(f"Process {_place()[0]} of {_place()[1]} ends by an exception.\n{lines}")
    sys.stderr.flush()
    os._exit(EXIT_CODE_OF_FOLLOWER if issubclass(kind, ProcessError) else 1)
