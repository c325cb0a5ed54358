"""Actions and faults that many tests share.

The actions record their calls, call a function, stop the run or raise an error.
"""

import concurrent.futures
import contextlib
import os
import resource

import jaxloop


class Do(jaxloop.Action):
    """Calls a function with the arguments of each of its calls, by their names."""

    closed = 0  # The number of calls of `close`.

    def __init__(self, function, interval=1, **attributes):
        super().__init__(interval)
        self.function = function
        vars(self).update(attributes)  # Such as uses_outputs=False and runs_last=True.

    def __call__(self, state, outputs, **context):
        return self.function(state=state, outputs=outputs, **context)

    def close(self):
        self.closed += 1


class Record(Do):
    """Stores what a function returns for each call, by default the number of the step, in `seen`."""

    def __init__(self, interval=1, what=lambda step_num, **_: step_num, **attributes):
        super().__init__(lambda **arguments: self.seen.append(what(**arguments)), interval, **attributes)
        self.seen = []


def lengths(interval=1):
    """Records the step and the number of losses of each call (None for a begin action)."""
    count = lambda outputs: None if outputs is None else len(outputs["loss"])
    return Record(interval, lambda step_num, outputs, **_: (step_num, count(outputs)))


class Stop(jaxloop.Action):
    """Asks for the end of the run."""

    def __call__(self, state, outputs, **context):
        outputs[jaxloop.STOP_LOOP] = True


class Fail(jaxloop.Action):
    """Raises an error, whether or not its outputs were computed."""

    uses_outputs = False

    def __init__(self, interval=1, error=None, **attributes):
        super().__init__(interval)
        self.error = error or OSError("the disk is gone")
        vars(self).update(attributes)

    def __call__(self, state, outputs, **context):
        raise self.error


def saving(directory, interval, step, *actions, eval_loops=(), **options):
    """Returns an `OuterLoop` that keeps all its checkpoints in a directory and resumes from them."""
    save = jaxloop.CheckpointAction(directory, interval, keep=None)
    train_loop = jaxloop.TrainLoop(step, end_actions=[*actions, save], **options)
    return jaxloop.OuterLoop(train_loop, eval_loops, jaxloop.CheckpointSpec(directory))


def then_fail(batches, error=None):
    """Yields batches, and then raises an error."""
    yield from batches
    raise error or OSError("the network is gone")


def raising(error):
    """Returns a function that raises an exception, or an OSError with a code."""

    def fail(*args, **kwargs):
        raise OSError(error, os.strerror(error)) if isinstance(error, int) else error

    return fail


def in_a_thread(function, *arguments, **options):
    """Returns the result of a call in another thread."""
    with concurrent.futures.ThreadPoolExecutor(1, "other") as pool:
        return pool.submit(function, *arguments, **options).result()


@contextlib.contextmanager
def limit_file_size(size):
    """Limits the size of files, so that longer writes fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
