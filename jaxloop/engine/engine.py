"""The engine that runs all loops. It iterates over loops and, within each loop, over steps."""

import bisect
import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import jax
from absl import logging

from jaxloop import agreement, checks, encoding, metrics, types
from jaxloop.actions.action import Action
from jaxloop.actions.action_list import ActionList
from jaxloop.engine.agenda import class_name, paired_with_saved, saved_state
from jaxloop.engine.ledger import Ledger
from jaxloop.engine.moments import Moments
from jaxloop.engine.progress import Progress
from jaxloop.engine.stepper import Call, Stepper
from jaxloop.feed import as_iterator
from jaxloop.schedules import NEVER, Elapsed, earliest
from jaxloop.step import Step
from jaxloop.text import printable


@final
class Engine:
    """Runs the loops of one `Loop` object: their steps, and everything that is due between steps.

    It calls the loop's `begin`, `run` and `end` hooks. Its `Stepper` calls `_get_next_batch`, `_run_one_step` and
    `update_outputs`.

    Args:
      loop: The loop whose hooks are called.
      step: The step that runs each batch.
      max_steps_in_flight: See `Loop`.

    Attributes:
      job: The processes that train together.
      progress: The progress of the run.
      stepper: The `Stepper` object, which runs the steps.
      moments: The `Moments` object, which runs everything that is due between steps.
      observers: Functions to call with each batch.
      kept: The most recent batches, which are needed to record a failure.
      rescued: A pair that is set when an exception occurs: `(state, None)`, where `state` is the state after the last
        completed step, or `(None, reason)` if that state can't be used.
    """

    def __init__(self, loop: Any, step: Step, max_steps_in_flight: int | None):
        is_shared = agreement.is_shared(step.partitioner.mesh)
        self._loop, self._step = loop, step
        self.job: agreement.Job = agreement.Job(is_shared)
        self.progress: Progress = Progress(is_shared=is_shared)
        self.stepper: Stepper = Stepper(loop, step, self.progress, self.job, max_steps_in_flight)
        self.moments: Moments = Moments(self.stepper, self.progress, self.job)
        self.stepper.readers = lambda: self.moments.agenda.has_readers
        self.observers: list[Callable[[types.Batch], None]] = []
        self.kept: KeptBatches = KeptBatches()
        self.rescued: tuple[Any, str | None] = (None, None)
        self._has_warned_of: set[str] = set()

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """All action lists, including the step's. Each list also counts the calls to its actions."""
        return (self.moments.begin_actions, self.moments.agenda.actions, *self._step.action_lists)

    def description(self) -> list[str]:
        """Returns lines that describe the loop. They must be identical in all processes of a job."""
        head = [repr(self._loop), f"  {self._step!r}", f"  max_steps_in_flight={self.stepper.max_in_flight}"]
        actions = [action for each in self.action_lists for action in each.actions]
        return [*head, *(f"  {class_name(action)}, interval {action.interval!r}" for action in actions)]

    # The loop over loops -------------------------------------------------------------------------------

    def train(
        self, state: Any, dataset: Iterator[types.Batch], steps_of_loop: Callable[[], int | None]
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Trains until the run ends or the data is exhausted. See `run_loops` for the arguments."""
        return self.run_loops(state, dataset, lambda: self._with_idle_ends(steps_of_loop()), trains=True)

    def run_loops(
        self, state: Any, dataset: Any, steps_of_loop: Callable[[], int | None], *, trains: bool
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs one loop after another, and returns the state and the outputs of the last loop.

        Args:
          state: See `Loop.__call__`.
          dataset: See `Loop.__call__`.
          steps_of_loop: A function that returns the maximum number of steps in the next loop, or None for no limit.
          trains: True if the steps change the state.
        """
        progress, requests, outputs = self.progress, self.job.requests, metrics.LoopOutputs()
        with self._step.watched(self.stepper.guard.watch if trains else None, self.progress.stopwatch):
            call = self._begin_call(state, trains)
            try:
                with requests, progress.stopwatch.counting("dispatch"):
                    while True:
                        self._begin_loop()
                        state, iterator = self._begin(call.state, dataset)
                        state, found = self._loop.run(state, iterator, steps_of_loop())
                        progress.count_loop(len(call.num_examples))
                        if call.num_examples or progress.batches_before:  # An empty loop doesn't end.
                            found = _weighted(found, self.stepper.ledger.weights)
                            state, outputs = self._finish_loop(state, found)
                        elif call.has_passed_end:  # The loop end that was passed turns out to be the last one.
                            call.was_interrupted = False  # The call stopped between two loops.
                            state, outputs = self._call_end_hook(state, self.stepper.ledger.ended)
                        call.state = state
                        if not self._continues(outputs):
                            break
                    if requests.outermost is requests:
                        self.job.any_stops()  # Detects signals that arrived after the last batch.
            except BaseException as error:
                if not call.is_failing:  # An exception between two loops. `run` handles those inside a loop.
                    self.stepper.rescue_outputs(error)
                problem = self.stepper.not_rescued_reason()
                self.rescued = (call.state if problem is None else None, problem)
                raise
            finally:
                call.state = None  # The caller owns it now.
                if call.made_iterator:  # No later call can continue this iterator, so reading ahead can end.
                    self.stepper.forget_batches()
        self.stepper.end_call(state)
        if requests.requested:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _begin_call(self, state: Any, trains: bool) -> Call:
        """Begins a call. If the last call ended at a different step, counting restarts at the state's step."""
        stepper, progress = self.stepper, self.progress
        if stepper.call.failed_step is not None:
            self.kept = KeptBatches()
        call = stepper.begin_call(state, trains=trains)
        # Reset only now: if the state was donated, `begin_call` raises, and `rescued` still holds the state to use.
        self.rescued = (None, None)
        step_num = stepper.read_step_num(call.state)
        if trains:
            if step_num != progress.steps:
                self.resume(Elapsed(step_num, loops=progress.loops))
            checks.mark_donated(call.state, f"{self._loop!r}, which began at step {step_num}")
        progress.steps = step_num
        if progress.is_inside:  # An exception ended the last call. This is a new loop.
            progress.restart_clock()
            if trains:
                stepper.ledger.end_part()
        if progress.began is None and not progress.batches_before:
            stepper.ledger.begin_loop()
        progress.is_ending = False
        self.moments.begin_call()
        return call

    def _begin_loop(self) -> None:
        self.stepper.begin_loop()
        if self.moments.statistics is not None:
            self.moments.statistics.begin_loop()

    def _begin(self, state: Any, dataset: Any) -> tuple[Any, Iterator[types.Batch]]:
        """Calls the `begin` hook, unless an earlier call has already begun the loop."""
        progress = self.progress
        if progress.began is not None:
            return state, (self._loop.begin(state, dataset)[1] if progress.began else self.open(dataset))
        state, iterator = self._loop.begin(state, dataset)
        progress.began = hasattr(dataset, "__next__") and iterator is not dataset
        return state, iterator

    def open(self, dataset: Any) -> Iterator[types.Batch]:
        """Returns the iterator to read batches from. The `begin` hook calls this method."""
        iterator = as_iterator(dataset)
        self.stepper.call.made_iterator = iterator is not dataset
        return iterator

    def begin(self, state: Any) -> None:
        """Calls the begin actions. The `begin` hook calls this method."""
        if self.progress.began is None:
            self.moments.call_begin_actions(state)

    def _finish_loop(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        """Calls the `end` hook. In a run, it then runs due evaluations and calls due actions with `runs_last`."""
        state, outputs = self._call_end_hook(state, outputs)
        call, moments, run, requests = self.stepper.call, self.moments, self.moments.run, self.job.requests
        if self.progress.is_inside and not requests.requested:  # An interrupted evaluation doesn't end.
            if run is not None or moments.agenda.slots:
                name = f"{type(self._loop).__name__}.end"
                raise ValueError(f"{name} must call super().end(state, outputs), which measures and calls the actions.")
            self.progress.restart_clock()
        call.state = state
        if self._is_interrupted() or run is None or run.end_data is None or requests.requested:
            return state, outputs
        # Set before this moment's saves, which store it.
        moments.stop_requested = self.job.any_stops(moments.stop_requested or outputs.asks_to_stop)
        if call.data_ended and not moments.stop_requested:
            run.end_data()
        now = self.progress.last_elapsed
        if not moments.evaluate_and_call_last(moments.due(now, at_end=True), state, now, at_end=True):
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _call_end_hook(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        weights = list(outputs.num_examples)
        state, ended = checks.check_result(self._loop.end(state, outputs), f"{type(self._loop).__name__}.end")
        return state, _weighted(ended, weights)

    def end(self, state: Any, outputs: dict[str, Any]) -> None:
        """Increments the count of completed loops, and calls the end actions. The `end` hook calls this method.

        In a run, end actions with `runs_last` are called later.
        """
        progress, moments, ledger = self.progress, self.moments, self.stepper.ledger
        if not self._steps_in_loop():  # The last loop has already been counted.
            return
        if self._is_interrupted():
            # The loop doesn't end here; a later call continues it.
            progress.last_elapsed = now = moments.elapsed_now()
            moments.call_due(moments.due(now), state, now, runs_last=False)
            progress.batches_before, progress.is_inside = self._steps_in_loop(), False
            return
        progress.last_elapsed = now = moments.now(ends_loop=True)
        ledger.end_loop(metrics.LoopOutputs(outputs, getattr(outputs, "num_examples", ())))
        progress.is_ending = True
        moments.call_due(moments.due(now, at_end=True), state, now, runs_last=False)
        progress.end_loop()
        self.stepper.call.has_passed_end = False
        if moments.run is None:
            moments.call_last(state)
        if moments.stop_requested:
            outputs[types.STOP_LOOP] = True

    def _is_interrupted(self) -> bool:
        """Returns True if this loop was interrupted between steps and a later call or process may continue it."""
        call, run = self.stepper.call, self.moments.run
        return run is not None and run.can_resume and call.trains and (call.was_interrupted or call.is_failing)

    def _continues(self, outputs: metrics.LoopOutputs) -> bool:
        """Returns True if this call runs another loop after the current one."""
        run = self.moments.run
        if run is None or run.end_data is None or self.job.requests.requested or self.progress.is_inside:
            return False
        return not (outputs.asks_to_stop or self.progress.last_elapsed.is_last or self.stepper.call.data_ended)

    def _steps_in_loop(self) -> int:
        return self.progress.batches_before + len(self.stepper.call.num_examples)

    # Loop boundaries where nothing is due ----------------------------------------------------------------

    def _with_idle_ends(self, num_steps: int | None) -> int | None:
        """Returns the number of steps until the next loop boundary where something may be due.

        Also sets `Call.idle_ends` to the boundaries before that one. The engine doesn't stop there, because stopping
        takes as long as a small step.
        """
        call, run, progress = self.stepper.call, self.moments.run, self.progress
        call.idle_ends = range(0)
        if not num_steps or run is None or run.loop_steps is None or not self._may_pass_ends():
            return num_steps
        goal, size = self.moments.goal(), run.loop_steps
        if goal.time < NEVER[1]:
            return num_steps
        first, end = progress.steps + num_steps, earliest([goal.step, run.total_steps])
        call.idle_ends = range(first, min(end, NEVER[0] - size), size)[: max(goal.loop - progress.loops - 1, 0)]
        return earliest([first + len(call.idle_ends) * size, run.total_steps]) - progress.steps

    def _may_pass_ends(self) -> bool:
        """Returns True if loops may end without a stop, because no hook, begin action or output requires one."""
        stepper, hooks = self.stepper, ("begin", "run", "end", "update_outputs", "_get_next_batch")
        queue, program = stepper.call.queue, stepper.call.program
        if queue is None or not queue.are_plain() or program is None or program.custom_step is not None:
            return False
        if stepper.guard.watch is not None or self.moments.begin_actions.actions:  # They act on each loop.
            return False
        return not any(checks.is_user_defined(self._loop, name) for name in hooks)

    def _pass_idle_ends(self) -> None:
        """Ends the loops that the latest steps completed without a stop."""
        call, progress, ends = self.stepper.call, self.progress, self.stepper.call.idle_ends
        passed = bisect.bisect_right(ends, progress.steps)
        if passed:
            last, size = ends[passed - 1], ends.step
            since = (progress.steps - last) // call.updates
            self.stepper.count_weights()
            before = len(call.num_examples) - since if passed == 1 else size // call.updates
            self.stepper.ledger.pass_ends(None if passed == 1 else before, since)
            progress.count_loop(before)
            progress.loops_run += passed - 1
            call.begin_next_loop(since)
            progress.end_loop(passed if since else passed - 1)
            progress.last_elapsed = dataclasses.replace(progress.last_elapsed, loops=progress.loops)
            if not since:
                progress.last_elapsed = self.moments.now(ends_loop=True)
                progress.end_loop()
            call.has_passed_end, call.idle_ends = True, ends[passed:]
            self.moments.statistics.begin_loop()
        if call.num_examples and progress.began is None:  # Another loop began without a stop.
            progress.is_inside, progress.began = True, False

    # The loop over steps -------------------------------------------------------------------------------

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Runs a loop's steps, and returns the final state and the outputs of all steps.

        The `run` hook calls this method. The engine doesn't stop at loop boundaries where nothing is due. If there are
        any, only the last loop's outputs are returned.
        """
        call, stepper, moments, requests = self.stepper.call, self.stepper, self.moments, self.job.requests
        num_batches = None if num_steps is None else num_steps // call.updates
        stepper.begin(dataset, num_batches)
        try:
            state = stepper.prepare(state, self._observers)
            step, secs = moments.next() if call.trains else NEVER
            while call.left(num_batches):
                try:
                    state, num_steps_run = stepper.run_steps(state, step, secs, call.left(num_batches))
                finally:
                    self._pass_idle_ends()
                stepper.push(state, num_steps_run)
                if stepper.has_ended():
                    call.data_ended = True
                    break
                was_commanded = moments.execute_commands()
                if requests.requested:
                    call.was_interrupted = call.left(num_batches) > 0
                    break
                if call.left(num_batches) and (was_commanded or self.progress.is_due(step, secs)):
                    now = moments.now()
                    # The loop continues only if there is another batch. Otherwise, `end` runs what is due.
                    if now.is_last or not stepper.has_more(functools.partial(self._before_reading_ahead, now)):
                        call.data_ended = stepper.has_ended()
                        break
                    call.place = "the actions"
                    checks.mark_donated(state, repr(self._loop))  # An action may keep it, but the next step donates it.
                    if not moments.run_moment_in_loop(state, now):
                        call.was_interrupted = requests.requested
                        break
                    step, secs = moments.next()
                call.place = "the dataset"
            call.place = self._step
            stepper.fetch()
            return state, stepper.ledger.whole_loop()
        except BaseException as error:
            if self.progress.began is None:  # The previous loop's end was passed, so the error is in the next loop.
                self.progress.is_inside, self.progress.began = True, False
            stepper.rescue_outputs(error)
            stepper.count_rescued_step()
            error.add_note(f"in {call.place}, after step {self.progress.steps}, in {self._loop!r}")
            raise
        finally:
            if call.program is not None and call.program.custom_step is None and call.state is not None:
                self._step.remember(call.state)  # An `end` hook may return any state.

    def _observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns the functions to call with each batch."""
        run, statistics = self.moments.run, self.moments.statistics
        counting = [] if statistics is None else statistics.observers()
        keeps = run is not None and run.keeps_batches and self.stepper.call.trains
        keeping = [self.kept.add] if keeps else []
        return [*self.observers, *counting, *keeping]

    def _before_reading_ahead(self, now: Elapsed) -> None:
        """Marks the position in the data if a save is due. Called before the next batch is read ahead."""
        if self.moments.saves_at(now):
            self.stepper.source.mark()

    # Saving and resuming ---------------------------------------------------------------------------------

    def resume(self, elapsed: Elapsed, batches_before: int = 0) -> None:
        """Sets the loop's counters to the progress of an earlier run, so that counting continues from there.

        The earlier run may have been in this process or a different one.

        Args:
          elapsed: The progress of the earlier run.
          batches_before: The number of the current loop's batches that the earlier run already trained on.
        """
        self.progress.resume(elapsed)
        self.moments.last_beginning, self.kept = elapsed.without_previous(), KeptBatches()
        self._reset()
        self.progress.batches_before = batches_before

    def set_loops(self, loops: int) -> None:
        """Sets the number of completed loops."""
        if loops != self.progress.loops:  # Outputs that no action has read yet belong to a different run.
            self._reset()
        self.progress.loops, self.progress.is_inside = loops, False
        self.progress.last_elapsed = dataclasses.replace(self.progress.last_elapsed, loops=loops)

    def _reset(self) -> None:
        self.progress.restart_clock()
        self.stepper.ledger = Ledger()
        self.moments.agenda.reset(self.progress.stopwatch.spent())

    def kept_by_step(self) -> dict[int, types.Batch]:
        """Returns the most recent batches read from the dataset, keyed by step."""
        failed, updates, step_num = self.stepper.call.failed_step, self.stepper.call.updates, self.stepper.step_num
        newest = step_num + (updates if failed == step_num + updates else 0)
        batches = list(self.kept.batches)
        first = newest - (len(batches) - 1) * updates
        return dict(zip(range(first, newest + 1, updates), batches, strict=True))

    @property
    def batches_consumed(self) -> int:
        """The number of batches that the source had returned when the last step completed."""
        return self.stepper.call.consumed

    def batches_ahead(self, source: Any) -> int:
        """Returns the number of batches that have been read from a source but not yet used."""
        return self.stepper.batches_ahead(source)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the state of the loop and its actions, to be stored in a checkpoint.

        Like an action, this must be called between two steps.

        Returns:
          A pair: the state as JSON-serializable values, and a dict of the train states kept by actions.
        """
        ledger, progress, moments, trains = self.stepper.ledger, self.progress, self.moments, self.stepper.call.trains
        elapsed, agenda = moments.elapsed, moments.agenda
        # An interrupted evaluation is repeated.
        is_inside = progress.is_inside and trains
        agenda.trim(ledger)
        slots, kept = agenda.state_dict()
        state_dict = {
            "elapsed": elapsed.to_dict(),
            "previous": (elapsed.previous or elapsed).to_dict(),
            "loop_count": progress.loops,
            "is_ending": progress.is_ending and not trains,
            "has_stopped": moments.stop_requested,
            "steps_in_loop": self._steps_in_loop() if is_inside else progress.batches_before,
            "has_begun": progress.began is not None and trains,
            "wraps_dataset": bool(progress.began),
            "last_beginning": moments.last_beginning.to_dict(),
            "steps_per_dispatch": self.stepper.steps_per_dispatch,
            "ledger": ledger.state_dict(self._encode, keeps_loop=trains and agenda.has_readers[1]),
            "slots": slots,
            "others": [saved_state(action) for action in self._other_actions()],
        }
        return state_dict, kept

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        """Restores a `state_dict` saved by a loop with the same actions, possibly in a different process."""
        elapsed, progress, stepper = Elapsed(**state_dict["elapsed"]), self.progress, self.stepper
        self.resume(elapsed, state_dict["steps_in_loop"])
        progress.last_elapsed = dataclasses.replace(elapsed, previous=Elapsed(**state_dict["previous"]))
        progress.loops, progress.is_ending = state_dict["loop_count"], state_dict["is_ending"]
        if state_dict["has_begun"] or progress.batches_before:
            progress.began = state_dict["wraps_dataset"]
        self.moments.last_beginning = Elapsed(**state_dict["last_beginning"])
        if stepper.steps_per_dispatch is None:  # A different number could change the last bits of the results.
            stepper.steps_per_dispatch = state_dict["steps_per_dispatch"]
        stepper.ledger = Ledger.of(state_dict["ledger"])
        self.moments.agenda.load_state_dict(state_dict["slots"], kept_states, self._loop)
        others = paired_with_saved(self._other_actions(), state_dict["others"], lambda action: action, self._loop)
        for action, kept in others:
            action.load_state_dict(encoding.decode(kept["state"]))

    def call_missed_actions(self, state: Any) -> bool:
        """Calls the end actions that were skipped because one of them raised an exception.

        Returns True if the run continues.
        """
        progress, moments = self.progress, self.moments
        call = self.stepper.call
        call.trains, call.updates, progress.is_inside = False, 1, True
        now, moments.stop_requested = moments.now(ends_loop=True), False
        moments.call_due(moments.due(now, at_end=True), state, now, runs_last=False)
        progress.last_elapsed = now
        progress.end_loop()
        return moments.call_last(state)

    def _other_actions(self) -> list[Action]:
        own = self.moments.agenda.actions
        return [action for each in self.action_lists if each is not own for action in each.actions]

    def _encode(self, outputs: metrics.LoopOutputs) -> dict[str, Any]:
        encoded, left_out = outputs.encode()
        if set(left_out) - self._has_warned_of:
            self._has_warned_of.update(left_out)
            logging.warning(
                "%r has outputs that a checkpoint can't store: %s. After a resume, an action that runs once every few "
                "steps receives these only for the steps after the resume.",
                self._loop,
                ", ".join(map(printable, left_out)),
            )
        return encoded


# The limits on the batches that are kept to record a failure.
_KEPT_BATCHES = 64
_KEPT_BYTES = 256 * 2**20


@final
class KeptBatches:
    """The most recent batches, kept so that a failure can be recorded.

    Up to a memory limit, these include the batches of all steps that may be in flight.

    Attributes:
      batches: The batches, oldest first.
    """

    def __init__(self):
        self.batches: collections.deque[types.Batch] = collections.deque()

    def add(self, batch: types.Batch) -> None:
        """Adds a batch, and drops the oldest one if there are more than the limits allow."""
        if not self.batches:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(batch))
            self.batches = collections.deque(maxlen=min(_KEPT_BATCHES, max(1, _KEPT_BYTES // max(size, 1))))
        self.batches.append(batch)


def _weighted(outputs: Any, weights: Sequence[int]) -> metrics.LoopOutputs:
    """Converts a hook's outputs to `LoopOutputs` with the given weights."""
    if not isinstance(outputs, metrics.LoopOutputs):
        outputs = metrics.LoopOutputs(outputs)
    outputs.num_examples = list(weights)
    return outputs
