"""Everything that describes a run of a loop: with the arrays of the state, it is a checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from absl import logging

from jaxloop.base.text import printable
from jaxloop.base.timing import Spent, Stopwatch
from jaxloop.engine.agenda import Agenda, Ended
from jaxloop.engine.outputs import Outputs
from jaxloop.metrics import LoopOutputs
from jaxloop.processes.agreement import Job
from jaxloop.schedules import Elapsed


@final
class Run:
    """The progress of a loop, the outputs that somebody has still to read, and the items that are called.

    Args:
      job: The processes that train together.
      measure: A function `(state, spent) -> statistics`.

    Attributes:
      stopwatch: Tracks how the time is spent.
      outputs: The outputs of the steps.
      agenda: The items.
      now: The progress after the latest step. `now.previous` is the progress one batch earlier, with the time of the
        last moment.
      loops: The number of loops that this loop object has ended.
      batches: The number of batches in the current loop, including those before a resume.
      longest: The number of batches in the longest loop that this process has run.
      loops_run: The number of loops that this process has run.
      agreed: The training time that all processes have agreed on; None in a single process.
      began_at: The progress when the begin actions were last checked.
      ended: The loop that has ended last, until the next one begins.
      wraps_data: True if the `begin` hook of the current loop wraps the data.
    """

    def __init__(
        self,
        job: Job,
        measure: Callable[[Any, Spent | None], Mapping[str, Any]],
    ):
        self.stopwatch: Stopwatch = Stopwatch()
        self.outputs: Outputs = Outputs(self.stopwatch)
        self.agenda: Agenda = Agenda(self.outputs, self.stopwatch, job, measure)
        self.now: Elapsed = Elapsed()
        self.loops: int = 0
        self.batches: int = 0
        self.longest: int = 0
        self.loops_run: int = 0
        self.agreed: float | None = 0.0 if job.is_shared else None
        self.began_at: Elapsed = Elapsed()
        self.ended: Ended | None = None
        self.wraps_data: bool = False
        self._offset = 0.0  # The training time of earlier runs, minus the stopwatch at the resume.
        self._has_warned_of: set[str] = set()
        self._moment_time = 0.0  # At the last moment. Nothing that is scheduled by time became due since then.

    def time(self) -> float:
        """Returns the training time in seconds, including earlier runs."""
        return self._offset + self._secs

    @property
    def _secs(self) -> float:
        return self.stopwatch.training_secs() if self.agreed is None else self.agreed

    def deadline(self, time: float) -> float:
        """Returns the clock reading at a training time. Slightly early, so that rounding doesn't make it late."""
        return self.stopwatch.reading_at(time - self._offset - 1e-9)

    def begin(self, now: Elapsed, batches: int = 0) -> None:
        """Starts to count at the given progress, and forgets what was not read."""
        self.now, self.loops, self.batches = now.without_previous(), now.loops, batches
        self.began_at, self._offset = self.now, now.time - self._secs
        self._moment_time, self.ended = now.time, None
        self.outputs.reset()
        self.agenda.reset()

    def count(self, examples: Sequence[int], updates: int) -> None:
        """Counts completed steps. `updates` is the number of updates per batch; 0 for an evaluation."""
        now, number = self.now, len(examples)
        self.batches += number
        self.stopwatch.steps += number * max(updates, 1)
        self.stopwatch.samples += sum(examples)
        if not number or not updates:
            return
        steps, samples = now.steps + number * updates, now.samples + sum(examples)
        before = Elapsed(steps - updates, samples - examples[-1], self._moment_time, now.loops)
        self.now = Elapsed(steps, samples, self.time(), now.loops, previous=before)

    def at_moment(self, loops: int, *, is_last: bool = False) -> Elapsed:
        """Returns the progress at a moment, where items may be called."""
        now, before = self.now, self.now.previous or self.now
        self._moment_time = time = self.time()
        self.now = Elapsed(now.steps, now.samples, time, loops, is_last, before.without_previous())
        return self.now

    def end_loop(self) -> None:
        """Ends the current loop at this position."""
        self.outputs.cut()
        self.outputs.begin_loop()
        self.longest = max(self.longest, self.batches)
        self.batches = 0
        self.loops, self.loops_run = self.loops + 1, self.loops_run + 1

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
        size, since = loop_steps // updates, (newest % loop_steps + (not also_here)) // updates
        self.longest = max(self.longest, self.batches - since - (passed - 1) * size, size if passed > 1 else 0)
        self.loops, self.loops_run, self.batches = self.loops + passed, self.loops_run + passed, since
        self.outputs.begin_loop(self.outputs.position - since)
        self.ended = None
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
        ended = self.ended if in_moment else None
        encode = lambda ended: [self._encode(ended.outputs), ended.start, ended.number]
        saved = {
            "ended": ended and encode(ended),
            "elapsed": self.now.to_dict(),
            "previous": (self.now.previous or self.now).to_dict(),
            "loops": self.loops,
            "steps_in_loop": self.batches,
            "has_stopped": self.agenda.wants_stop,
            "owes_trim": self.agenda.owes_trim,
            "wraps_data": self.wraps_data,
            "began_at": self.began_at.to_dict(),
            "items": self.agenda.state_dict(),
            "ended_loops": list(map(encode, self.agenda.loops)),
            "outputs": self.outputs.state_dict(self.agenda.cursors, self._encode),
        }
        return saved, self.agenda.kept_states()

    def load_state_dict(self, saved: Mapping[str, Any], kept: Mapping[str, Any]) -> None:
        """Restores a `state_dict`."""
        now = Elapsed(**saved["elapsed"])
        self.begin(now, saved["steps_in_loop"])
        self.now = dataclasses.replace(now, previous=Elapsed(**saved["previous"]))
        self.loops, self.began_at = saved["loops"], Elapsed(**saved["began_at"])
        self.wraps_data = saved["wraps_data"]
        decode = lambda ended: Ended(LoopOutputs.decode(ended[0]), *ended[1:])
        self.ended = saved["ended"] and decode(saved["ended"])
        self.outputs.load_state_dict(saved["outputs"])
        self.agenda.wants_stop, self.agenda.owes_trim = saved["has_stopped"], saved["owes_trim"]
        self.agenda.load_state_dict(saved["items"], kept)
        self.agenda.loops = list(map(decode, saved["ended_loops"]))

    def _encode(self, outputs: LoopOutputs) -> dict[str, Any]:
        encoded, left_out = outputs.encode()
        if set(left_out) - self._has_warned_of:
            self._has_warned_of.update(left_out)
            logging.warning(
                "The run has outputs that a checkpoint can't store: %s. After a resume, an action that runs once every "
                "few steps receives these only for the steps after the resume.",
                ", ".join(map(printable, left_out)),
            )
        return encoded
