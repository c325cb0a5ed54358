"""Everything that describes a run of a loop: with the arrays of the state, it is a checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jaxloop.base.timing import Spent, Stopwatch
from jaxloop.engine.agenda import Agenda
from jaxloop.engine.outputs import Outputs
from jaxloop.processes.agreement import Job
from jaxloop.schedules import Elapsed


@final
class Clock:
    """The training time of a run, including the earlier processes that it resumes.

    Args:
      stopwatch: Tracks how the time is spent in this process.
      is_shared: Whether the processes of a job agree on the time.

    Attributes:
      stopwatch: The argument of the same name.
      agreed: The training time in the first process, as far as all processes know it; None in a single process.
      moment: The training time at the last moment. Everything that was due by then has been called.
    """

    def __init__(self, stopwatch: Stopwatch, *, is_shared: bool):
        self.stopwatch: Stopwatch = stopwatch
        self.agreed: float | None = 0.0 if is_shared else None
        self.moment: float = 0.0
        self._offset = 0.0  # The training time of earlier processes, minus the stopwatch at the resume.

    def begin(self, time: float) -> None:
        """Sets the training time in seconds."""
        self._offset, self.moment = 0.0, time
        self._offset = time - self.time()

    def time(self) -> float:
        """Returns the training time in seconds."""
        return self._offset + (self.stopwatch.training_secs() if self.agreed is None else self.agreed)

    def deadline(self, time: float) -> float:
        """Returns the clock reading at a training time. Slightly early, so that rounding doesn't make it late."""
        return self.stopwatch.reading_at(time - self._offset - 1e-9)


@final
class Run:
    """The progress of a loop, the outputs that somebody has still to read, and the items that are called.

    Args:
      job: The processes that train together.
      measure: A function `(state, spent, cursor) -> statistics`.

    Attributes:
      stopwatch: Tracks how the time is spent.
      clock: The training time.
      outputs: The outputs of the steps.
      agenda: The items.
      now: The progress after the latest step. `now.previous` is the progress one batch earlier, with the time of the
        last moment.
      loops: The number of loops that this loop object has ended.
      batches: The number of batches in the current loop, including those before a resume.
      began_at: The progress when the begin actions were last checked.
    """

    def __init__(self, job: Job, measure: Callable[[Any, Spent, int], Mapping[str, Any]]):
        self.stopwatch: Stopwatch = Stopwatch()
        self.clock: Clock = Clock(self.stopwatch, is_shared=job.is_shared)
        self.outputs: Outputs = Outputs(self.stopwatch)
        self.agenda: Agenda = Agenda(self.outputs, self.stopwatch, job, measure)
        self.begin(Elapsed())

    def begin(self, now: Elapsed) -> None:
        """Starts to count at the given progress, and forgets what was not read."""
        self.now: Elapsed = now.without_previous()
        self.loops: int = now.loops
        self.batches: int = 0
        self.began_at: Elapsed = self.now
        self.clock.begin(now.time)
        self.outputs.reset()
        self.agenda.reset()

    def count(self, examples: Sequence[int], updates: int) -> None:
        """Counts completed steps. `updates` is the number of updates per batch; 0 for an evaluation."""
        now, number, total, stopwatch = self.now, len(examples), sum(examples), self.stopwatch
        self.batches += number
        stopwatch.steps += number * max(updates, 1)
        stopwatch.samples += total
        if not number or not updates:
            return
        steps, samples = now.steps + number * updates, now.samples + total
        before = Elapsed(steps - updates, samples - examples[-1], self.clock.moment, now.loops)
        self.now = Elapsed(steps, samples, self.clock.time(), now.loops, previous=before)

    def at_moment(self, loops: int, *, is_last: bool = False) -> Elapsed:
        """Returns the progress at a moment, where items may be called."""
        now, before = self.now, self.now.previous or self.now
        self.clock.moment = time = self.clock.time()
        self.now = Elapsed(now.steps, now.samples, time, loops, is_last, before.without_previous())
        return self.now

    def end_loop(self) -> None:
        """Ends the current loop at this position."""
        self.outputs.cut()
        self.outputs.begin_loop()
        self.loops, self.batches = self.loops + 1, 0

    def pass_ends(self, loop_steps: int, updates: int, *, also_here: bool) -> bool:
        """Ends the loops that the latest steps completed without a stop. Returns True if there were any.

        After steps 7 to 25 with loops of 10 steps, the loops end that contain steps 10 and 20.

        Args:
          loop_steps: The number of updates per loop.
          updates: The number of updates per batch.
          also_here: Whether to end a loop that ends at the last of these steps, too.
        """
        now, before, newest = self.now, self.now.steps - self.batches * updates, self.now.steps - (not also_here)
        passed = newest // loop_steps - before // loop_steps
        if passed <= 0:
            return False
        since = (now.steps - newest // loop_steps * loop_steps) // updates
        self.loops, self.batches = self.loops + passed, since
        self.outputs.begin_loop(self.outputs.position - since)
        self.agenda.ended = None
        before_now = now.previous.loops + passed - (also_here and since == 0) if now.previous else 0
        previous = now.previous and dataclasses.replace(now.previous, loops=before_now)
        self.now = dataclasses.replace(now, loops=now.loops + passed, previous=previous)
        return True

    def drop_loop(self) -> None:
        """Forgets the current loop."""
        self.outputs.drop_loop()
        self.batches = 0

    # Saving ------------------------------------------------------------------------------------------

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns JSON values, and the train states that items keep.

        Args:
          in_moment: True if some items may have to be called again after a resume.
        """
        agenda, kept = self.agenda.state_dict(self.now.steps, in_moment=in_moment)
        saved = {
            "elapsed": self.now.to_dict(),
            "previous": (self.now.previous or self.now).to_dict(),
            "loops": self.loops,
            "steps_in_loop": self.batches,
            "began_at": self.began_at.to_dict(),
            "agenda": agenda,
            "outputs": self.outputs.state_dict(self.agenda.cursors),
        }
        return saved, kept

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores a `state_dict`, after `begin`."""
        self.now = Elapsed(**saved["elapsed"], previous=Elapsed(**saved["previous"]))
        self.loops, self.batches, self.began_at = saved["loops"], saved["steps_in_loop"], Elapsed(**saved["began_at"])
        self.clock.begin(self.now.time)
        self.outputs.load_state_dict(saved["outputs"])
        self.agenda.load_state_dict(saved["agenda"], kept, self.now.steps)
