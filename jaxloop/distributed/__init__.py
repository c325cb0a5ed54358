"""Functions that connect and shut down the processes of a multi-process job."""

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
"""The environment variables that `initialize` reads if its first three arguments are not given."""

EXIT_CODE_OF_FOLLOWER = 76
"""The exit code of a process that exits because another process failed."""


class ProcessError(RuntimeError):
    """Raised in a process that can't continue because another process in its job has failed."""


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
    """Connects this process to the other processes of its job. Call this function before using JAX.

    If the first three arguments are not given, this function reads the environment variables JAXLOOP_COORDINATOR,
    JAXLOOP_NUM_PROCESSES and JAXLOOP_PROCESS_ID. If these variables are not set, the function detects jobs on SLURM,
    Open MPI, Cloud TPUs and Kubernetes, as `jax.distributed.initialize` does. Under Open MPI 5, this requires mpi4py
    and JAX 0.11.2 or newer. If no job is found, the program continues as a single process.

    Afterwards, `jax.devices()` lists the devices of all processes. A process with an uncaught exception prints the
    exception and its process index, and exits immediately. The other processes detect this within `heartbeat_secs` and
    also exit.

    >>> initialize()  # doctest: +SKIP

    Args:
      coordinator_address: The `host:port` of process 0.
      num_processes: The number of processes.
      process_id: The zero-based index of this process.
      local_device_ids: The IDs of the GPUs that this process uses, or None to use all GPUs on the machine.
      start_secs: The maximum number of seconds to wait for the other processes to join.
      heartbeat_secs: The number of seconds without a heartbeat after which a process is considered to have failed.
      shutdown_secs: The maximum number of seconds that a process waits for the others after finishing normally.

    Raises:
      ValueError: If only some of the first three arguments are given, and JAX can't detect the others.
      RuntimeError: If JAX has already been initialized, or if the other processes didn't join in time.
    """
    if {coordinator_address, num_processes, process_id} == {None} and COORDINATOR in os.environ:
        coordinator_address = os.environ[COORDINATOR]
        num_processes, process_id = int(os.environ[NUM_PROCESSES]), int(os.environ[PROCESS_ID])
    jax.config.update("jax_enable_preemption_service", False)  # It would swallow SIGTERM, which jaxloop handles.
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
        is_given = (coordinator_address, num_processes, process_id) != (None, None, None)
        if is_given or "coordinator_address should be defined" not in str(error):
            raise
        logging.info("No cluster was found: this is the only process.")
        return
    if jax.process_count() > 1:
        sys.excepthook = _end_at_once
    logging.info("Process %d of %d, with %d of %d devices.", *place(), jax.local_device_count(), jax.device_count())


def is_first_process() -> bool:
    """Returns True in the process that writes the job's files: process 0, or the only process.

    >>> is_first_process()
    True
    """
    # Without the first check, calling JAX might initialize it.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def exit_without_waiting(error: SystemExit) -> None:
    """Ensures that this process doesn't wait for the other processes when it exits with the given error.

    Use this function if only this process has failed, because the other processes may be waiting for this one. By
    contrast, a process that finishes normally waits for the others; see `shutdown_secs` in `initialize`. If the exit
    code of `error` is 0 or None, this function does nothing.
    """

    def exit_now() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else 1)

    if error.code not in (None, 0):
        atexit.register(exit_now)


def place() -> tuple[int, int]:
    """Returns the zero-based index of this process and the total number of processes."""
    return jax.process_index(), jax.process_count()


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
    """Prints an exception and ends this process at once, because a normal exit would wait for the other processes."""
    lines = "".join(traceback.format_exception(kind, error, trace))
    sys.stdout.flush()
    sys.stderr.write(f"Process {place()[0]} of {place()[1]} ends with an exception.\n{lines}")
    sys.stderr.flush()
    os._exit(EXIT_CODE_OF_FOLLOWER if issubclass(kind, ProcessError) else 1)
