"""The progress of a loop, counted on the host."""

import math
from collections.abc import Sequence
from typing import final

from jaxloop import timing
from jaxloop.schedules import Elapsed


@final
class Progress:
    """Counts the steps, examples, seconds and loops of a run.

    >>> progress = Progress()
    >>> progress.count([8, 8])
    >>> progress.elapsed_now()
    Elapsed(steps=2, samples=16, time=0.0, loops=0)

    Args:
      is_shared: True if several processes train together.

    Attributes:
      stopwatch: The stopwatch that tracks how the time is spent.
      steps: The number of completed updates.
      samples: The number of examples in all batches so far.
      loops: The number of loops that have ended.
      last_elapsed: The progress at the last moment, or as passed to `resume`.
      agreed_secs: In a multi-process job, the training time in seconds at the latest batch, as measured by the first
        process. None with a single process.
      secs_before: The training time, in seconds, at which the second-to-last batch arrived.
      batches_before: The number of batches in the current loop that an earlier call or run trained on.
      began: True if the `begin` hook returned an iterator other than the one it received; None before it is called.
      is_inside: True if a loop has begun, and has neither ended nor been interrupted.
      is_ending: True while end actions are being called. Some of them may not have been called yet.
      loops_run: The number of loops that this process has run.
      longest_loop: The number of batches in the longest of these loops.
    """

    def __init__(self, *, is_shared: bool = False):
        self.stopwatch: timing.Stopwatch = timing.Stopwatch()
        self.steps: int = 0
        self.samples: int = 0
        self.loops: int = 0
        self.last_elapsed: Elapsed = Elapsed()
        self.agreed_secs: float | None = 0.0 if is_shared else None
        self.secs_before: float = 0.0
        self.batches_before: int = 0
        self.began: bool | None = None
        self.is_inside: bool = False
        self.is_ending: bool = False
        self.loops_run: int = 0
        self.longest_loop: int = 0
        self._offset = 0.0  # The training time of earlier runs, minus the stopwatch at the resume.
        self._newest_batch: tuple[int, int] | None = None  # Its numbers of updates and examples.

    def secs(self) -> float:
        """Returns the stopwatch's training time, in seconds.

        In a multi-process job, the first process's stopwatch is used.
        """
        return self.stopwatch.training_secs() if self.agreed_secs is None else self.agreed_secs

    def time(self) -> float:
        """Returns the training time in seconds, including the time of earlier runs."""
        return self._offset + self.secs()

    def secs_at(self, time: float) -> float:
        """Converts a value of `time()` to the corresponding value of `secs()`."""
        return time - self._offset

    def is_due(self, step: int, secs: float) -> bool:
        """Returns True if the given step or the given stopwatch time has been reached."""
        return self.steps >= step or (secs < math.inf and self.secs() >= secs)

    def resume(self, elapsed: Elapsed) -> None:
        """Sets the counters to the progress of an earlier run, so that counting continues from there.

        The earlier run may have been in this process or a different one.
        """
        self.steps, self.samples, self.loops = elapsed.steps, elapsed.samples, elapsed.loops
        self._offset = elapsed.time - self.secs()
        self.last_elapsed, self._newest_batch = elapsed.without_previous(), None
        self.restart_clock()

    def begin_loop(self) -> None:
        """Begins or continues a loop. Until its first batch, `Elapsed.previous` is the progress at the last moment."""
        self._newest_batch, self.is_inside = None, True

    def end_loop(self, number: int = 1) -> None:
        """Counts `number` loops that have ended. The next loop hasn't begun yet."""
        self.loops += number
        self.restart_clock()

    def restart_clock(self) -> None:
        """Resets the counters and flags of the current loop."""
        self.batches_before, self.began, self.is_inside, self.is_ending = 0, None, False, False

    def count(self, num_examples: Sequence[int], updates: int = 1, *, trains: bool = True) -> None:
        """Counts steps.

        Args:
          num_examples: The number of examples in each step.
          updates: The number of updates that each step made.
          trains: False for an evaluation, whose steps are counted only by the stopwatch and in `samples`.
        """
        samples = sum(num_examples)
        self.samples += samples
        self.stopwatch.steps += len(num_examples) * updates
        self.stopwatch.samples += samples
        if trains and num_examples:
            self.steps += len(num_examples) * updates
            self._newest_batch = updates, num_examples[-1]

    def count_loop(self, num_batches: int) -> None:
        """Counts a loop as run by this process, unless it was empty."""
        self.loops_run += num_batches > 0
        self.longest_loop = max(self.longest_loop, num_batches)

    def elapsed_now(self, loops: int | None = None) -> Elapsed:
        """Returns the current progress. Its `previous` is the progress one batch earlier.

        Args:
          loops: The number of loops that have ended; None to use the number counted so far.
        """
        earlier, loops = self.last_elapsed, self.loops if loops is None else loops
        if self._newest_batch is not None:
            updates, examples = self._newest_batch
            steps, samples = self.steps - updates, self.samples - examples
            # The time since then, such as the time spent in actions, belongs to this step.
            time = earlier.time if earlier.steps == steps else self._offset + self.secs_before
            earlier = Elapsed(steps, samples, time, earlier.loops)
        return Elapsed(self.steps, self.samples, self.time(), loops, previous=earlier.without_previous())
