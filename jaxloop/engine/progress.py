"""How far a loop is, counted on the host."""

import math
from collections.abc import Callable, Sequence
from typing import final

from jaxloop import timing
from jaxloop.schedules import Elapsed


@final
class Progress:
    """Counts the steps, examples, seconds and loops of a run.

    >>> progress = Progress(lambda: 0.0)
    >>> progress.count([8, 8])
    >>> progress.look()
    Elapsed(steps=2, samples=16, time=0.0, loops=0)

    Args:
      clock: tells the time in seconds.

    Attributes:
      stopwatch: counts what the time goes to.
      steps: completed updates.
      samples: examples of the batches so far.
      loops: loops that have ended.
      last_elapsed: the progress as of the last look, or as it was given to `resume`.
      agreed_secs: with other processes, the seconds of training that the stopwatch of the first had counted at the
        newest batch; None in a process that is alone.
      secs_before: the seconds of training when the batch before the newest came.
      batches_before: how many batches of the loop under way an earlier call, or run, has trained on.
      began: whether the hook `begin` has returned another iterator than it was given; None before it was called.
      is_inside: whether a loop has begun, and was not ended or broken off.
      is_ending: whether end actions are being called, some of them perhaps not yet.
      loops_run: loops that were run in this process.
      longest_loop: the most batches that one of these had.
    """

    def __init__(self, clock: Callable[[], float], *, is_shared: bool = False):
        self.stopwatch: timing.Stopwatch = timing.Stopwatch(clock)
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
        self._offset = 0.0  # Training time of earlier runs, less what the stopwatch had counted then.
        self._newest_batch: tuple[int, int] | None = None  # Its updates and its examples.

    def secs(self) -> float:
        """Returns the seconds of training by the stopwatch; with other processes, by that of the first."""
        return self.stopwatch.training_secs() if self.agreed_secs is None else self.agreed_secs

    def time(self) -> float:
        """Returns the seconds of training, those of earlier runs included."""
        return self._offset + self.secs()

    def secs_at(self, time: float) -> float:
        """Returns what `secs` is when `time` is this."""
        return time - self._offset

    def is_due(self, step: int, secs: float) -> bool:
        """Returns whether a step, or a time by the stopwatch, has come."""
        return self.steps >= step or (secs < math.inf and self.secs() >= secs)

    def resume(self, elapsed: Elapsed) -> None:
        """Goes on counting from where an earlier run, in this process or another, left off."""
        self.steps, self.samples, self.loops = elapsed.steps, elapsed.samples, elapsed.loops
        self._offset = elapsed.time - self.secs()
        self.last_elapsed, self._newest_batch = elapsed.without_previous(), None
        self.restart_clock()

    def begin_loop(self) -> None:
        """Begins a loop, or goes on with one; until its first batch, `previous` is the last look."""
        self._newest_batch, self.is_inside = None, True

    def end_loop(self, number: int = 1) -> None:
        """Counts loops that have ended; the next one has not begun."""
        self.loops += number
        self.restart_clock()

    def restart_clock(self) -> None:
        """Forgets the loop under way."""
        self.batches_before, self.began, self.is_inside, self.is_ending = 0, None, False, False

    def count(self, num_examples: Sequence[int], updates: int = 1, *, trains: bool = True) -> None:
        """Counts steps.

        Args:
          num_examples: for each step how many examples it had.
          updates: how many updates each of them made.
          trains: False for an evaluation, whose steps are none of the training; the stopwatch alone counts those.
        """
        samples = sum(num_examples)
        self.samples += samples
        self.stopwatch.steps += len(num_examples) * updates
        self.stopwatch.samples += samples
        if trains and num_examples:
            self.steps += len(num_examples) * updates
            self._newest_batch = updates, num_examples[-1]

    def count_loop(self, num_batches: int) -> None:
        """Counts a loop of so many batches among those that were run here; none without a batch."""
        self.loops_run += num_batches > 0
        self.longest_loop = max(self.longest_loop, num_batches)

    def look(self, loops: int | None = None) -> Elapsed:
        """Returns how far the loop is now, with `previous` a batch earlier.

        Args:
          loops: how many loops have ended; None for as many as were counted.
        """
        earlier, loops = self.last_elapsed, self.loops if loops is None else loops
        if self._newest_batch is not None:
            updates, examples = self._newest_batch
            steps, samples = self.steps - updates, self.samples - examples
            # What passed since then in actions, say, belongs to this step.
            time = earlier.time if earlier.steps == steps else self._offset + self.secs_before
            earlier = Elapsed(steps, samples, time, earlier.loops)
        return Elapsed(self.steps, self.samples, self.time(), loops, previous=earlier.without_previous())
