"""The engine of all loops: the loop over loops, and the loop over steps."""

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
from jaxloop.engine.agenda import class_name, matched, remembered
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
    """Runs the loops of one object: takes their steps, and calls what is due between two of them.

    What a loop is, its hooks say, which are called from here: `begin`, `run`, `end`, and from the `Stepper`
    `_get_next_batch`, `_run_one_step` and `update_outputs`.

    Args:
      loop: whose hooks are called.
      step: what happens to one batch.
      clock: tells the time in seconds.
      max_steps_in_flight: see `Loop`.

    Attributes:
      job: the processes that train together.
      progress: how far the run is.
      stepper: takes the steps.
      moments: calls what is due between two of them.
      observers: are called with each batch of a call.
      kept: the last batches, for the record of a failure.
      rescued: the state as of the last whole step of a call that an exception ended, and the reason why there is none.
    """

    def __init__(self, loop: Any, step: Step, clock: Callable[[], float], max_steps_in_flight: int | None):
        is_shared = agreement.is_shared(step.partitioner.mesh)
        self._loop, self._step = loop, step
        self.job: agreement.Job = agreement.Job(is_shared)
        self.progress: Progress = Progress(clock, is_shared=is_shared)
        self.stepper: Stepper = Stepper(loop, step, self.progress, self.job, max_steps_in_flight)
        self.moments: Moments = Moments(self.stepper, self.progress, self.job)
        self.stepper.readers = lambda: self.moments.agenda.series_read
        self.observers: list[Callable[[types.Batch], None]] = []
        self.kept: KeptBatches = KeptBatches()
        self.rescued: tuple[Any, str | None] = (None, None)
        self._has_warned_of: set[str] = set()

    @property
    def action_lists(self) -> Sequence[ActionList]:
        """All actions, the step's too, and how often each has been called."""
        return (self.moments.beginnings, self.moments.agenda.actions, *self._step.action_lists)

    def description(self) -> list[str]:
        """Returns what must be the same in all processes of a job, a line each."""
        head = [repr(self._loop), f"  {self._step!r}", f"  max_steps_in_flight={self.stepper.max_in_flight}"]
        actions = [action for each in self.action_lists for action in each.actions]
        return [*head, *(f"  {class_name(action)}, interval {action.interval!r}" for action in actions)]

    # The loop over loops -------------------------------------------------------------------------------

    def train(
        self, state: Any, dataset: Iterator[types.Batch], steps_of_loop: Callable[[], int | None]
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs loop after loop, as part of a run, to the end of it, or of the data.

        Args:
          state: see `Loop.__call__`.
          dataset: likewise.
          steps_of_loop: returns how many steps the next loop has at most; None for no limit.
        """
        return self.run_loops(state, dataset, lambda: self._with_silent_loops(steps_of_loop()), trains=True)

    def run_loops(
        self, state: Any, dataset: Any, steps_of_loop: Callable[[], int | None], *, trains: bool
    ) -> tuple[Any, metrics.LoopOutputs]:
        """Runs loops, one after the other as long as `_continues` says; returns the outputs of the last one.

        Args:
          state: see `Loop.__call__`.
          dataset: likewise.
          steps_of_loop: returns how many steps the next loop has at most; None for no limit.
          trains: whether the steps change the state.
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
                        if call.num_examples or progress.batches_before:  # Else no batch: there is nothing to end.
                            found = _weighted(found, self.stepper.ledger.weights)
                            state, outputs = self._finish_loop(state, found)
                        elif call.has_passed_end:  # It turns out that this was the last one.
                            call.was_interrupted = False  # It was not amid a loop.
                            state, outputs = self._call_end_hook(state, self.stepper.ledger.ended)
                        call.state = state
                        if not self._continues(outputs):
                            break
                    if requests.outermost is requests:
                        self.job.any_stops()  # Of a signal that came since the last batch.
            except BaseException as error:
                if not call.is_failing:  # Between two loops: else it was done where the loop has failed.
                    self.stepper.rescue_outputs(error)
                problem = self.stepper.not_rescued_reason()
                self.rescued = (call.state if problem is None else None, problem)
                raise
            finally:
                call.state = None  # It is the caller's.
                if call.made_iterator:  # Nobody goes on from here: what draws ahead may end.
                    self.stepper.forget_batches()
        self.stepper.end_call(state)
        if requests.requested:
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _begin_call(self, state: Any, trains: bool) -> Call:
        """Begins a call; counts on from where the state is, anew where it is not the one that was returned last."""
        stepper, progress = self.stepper, self.progress
        if stepper.call.failed_step is not None:
            self.kept = KeptBatches()
        call = stepper.begin_call(state, trains=trains)
        self.rescued = (None, None)  # Not before: a donated state is refused, and the one to go on from is kept.
        step_num = stepper.read_step_num(call.state)
        if trains:
            if step_num != progress.steps:
                self.resume(Elapsed(step_num, loops=progress.loops))
            checks.mark_donated(call.state, f"{self._loop!r}, which began at step {step_num}")
        progress.steps = step_num
        if progress.is_inside:  # An exception ended the last call: this is another loop.
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
        """Calls the hook `begin`, unless an earlier call has begun the loop."""
        progress = self.progress
        if progress.began is not None:
            return state, (self._loop.begin(state, dataset)[1] if progress.began else self.open(dataset))
        state, iterator = self._loop.begin(state, dataset)
        progress.began = hasattr(dataset, "__next__") and iterator is not dataset
        return state, iterator

    def open(self, dataset: Any) -> Iterator[types.Batch]:
        """Returns the iterator to draw batches from, in the hook `begin`."""
        iterator = as_iterator(dataset)
        self.stepper.call.made_iterator = iterator is not dataset
        return iterator

    def begin(self, state: Any) -> None:
        """Calls the begin actions, in the hook `begin`."""
        if self.progress.began is None:
            self.moments.call_beginnings(state)

    def _finish_loop(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        """Ends a loop by the hook `end`; then, in a run, evaluates, and calls what comes last."""
        state, outputs = self._call_end_hook(state, outputs)
        call, moments, run, requests = self.stepper.call, self.moments, self.moments.run, self.job.requests
        if self.progress.is_inside and not requests.requested:  # Else an evaluation has no end.
            if run is not None or moments.agenda.slots:
                name = f"{type(self._loop).__name__}.end"
                raise ValueError(f"{name} must call super().end(state, outputs), which measures and calls the actions.")
            self.progress.restart_clock()
        call.state = state
        if self._is_interrupted() or run is None or run.end_data is None or requests.requested:
            return state, outputs
        # A checkpoint of this moment has to know it.
        moments.stop_requested = self.job.any_stops(moments.stop_requested or outputs.asks_to_stop)
        if call.data_ended and not moments.stop_requested:
            run.end_data()
        now = self.progress.last_elapsed
        if not moments.follow(moments.due(now, at_end=True), state, now, at_end=True):
            outputs[types.STOP_LOOP] = True
        return state, outputs

    def _call_end_hook(self, state: Any, outputs: metrics.LoopOutputs) -> tuple[Any, metrics.LoopOutputs]:
        weights = list(outputs.num_examples)
        state, ended = checks.check_result(self._loop.end(state, outputs), f"{type(self._loop).__name__}.end")
        return state, _weighted(ended, weights)

    def end(self, state: Any, outputs: dict[str, Any]) -> None:
        """Counts a loop that has ended, and calls the end actions that don't come last, in the hook `end`."""
        progress, moments, ledger = self.progress, self.moments, self.stepper.ledger
        if not self._steps_in_loop():  # It was counted before, and is the last.
            return
        if self._is_interrupted():
            # Here is no end of a loop, only a step of one that goes on in a later call.
            progress.last_elapsed = now = moments.look()
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
        """Whether a later call, or process, goes on with this loop amid its steps."""
        call, run = self.stepper.call, self.moments.run
        return run is not None and run.can_resume and call.trains and (call.was_interrupted or call.is_failing)

    def _continues(self, outputs: metrics.LoopOutputs) -> bool:
        """Returns whether another loop follows in this call."""
        run = self.moments.run
        if run is None or run.end_data is None or self.job.requests.requested or self.progress.is_inside:
            return False
        return not (outputs.asks_to_stop or self.progress.last_elapsed.is_last or self.stepper.call.data_ended)

    def _steps_in_loop(self) -> int:
        return self.progress.batches_before + len(self.stepper.call.num_examples)

    # Loops of whose end nobody is to hear ----------------------------------------------------------------

    def _with_silent_loops(self, num_steps: int | None) -> int | None:
        """Returns the steps of the next loop, and of those after it up to an end that somebody is to hear of.

        The ends between, `Call.silent_ends`, are passed without a halt: to halt takes as long as a small step.
        """
        call, run, progress = self.stepper.call, self.moments.run, self.progress
        call.silent_ends = range(0)
        if not num_steps or run is None or run.loop_steps is None or not self._may_pass_ends():
            return num_steps
        goal, size = self.moments.goal(), run.loop_steps
        if goal.time < NEVER[1]:
            return num_steps
        first, end = progress.steps + num_steps, earliest([goal.step, run.total_steps])
        call.silent_ends = range(first, min(end, NEVER[0] - size), size)[: max(goal.loop - progress.loops - 1, 0)]
        return earliest([first + len(call.silent_ends) * size, run.total_steps]) - progress.steps

    def _may_pass_ends(self) -> bool:
        """Whether all that may be done at the end of a loop is known in advance."""
        stepper, hooks = self.stepper, ("begin", "run", "end", "update_outputs", "_get_next_batch")
        queue, program = stepper.call.queue, stepper.call.program
        if queue is None or not queue.are_plain() or program is None or program.own is not None:
            return False
        if stepper.guard.watch is not None or self.moments.beginnings.actions:  # Those tell of each loop.
            return False
        return not any(checks.is_user_defined(self._loop, name) for name in hooks)

    def _pass_silent_ends(self) -> None:
        """Ends the loops whose ends were passed with the newest steps."""
        call, progress, ends = self.stepper.call, self.progress, self.stepper.call.silent_ends
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
            call.has_passed_end, call.silent_ends = True, ends[passed:]
            self.moments.statistics.begin_loop()
        if call.num_examples and progress.began is None:  # Another loop has begun without a halt.
            progress.is_inside, progress.began = True, False

    # The loop over steps -------------------------------------------------------------------------------

    def run(self, state: Any, dataset: Iterator[types.Batch], num_steps: int | None) -> tuple[Any, Any]:
        """Takes the steps of a loop, in the hook `run`; returns the newest state and the outputs of all steps.

        Loops before the last one may have ended inside.
        """
        call, stepper, moments, requests = self.stepper.call, self.stepper, self.moments, self.job.requests
        num_batches = None if num_steps is None else num_steps // call.updates
        stepper.begin(dataset, num_batches)
        try:
            state = stepper.prepare(state, self._observers)
            step, secs = moments.next() if call.trains else NEVER
            while call.left(num_batches):
                try:
                    state, num_steps_run = stepper.take(state, step, secs, call.left(num_batches))
                finally:
                    self._pass_silent_ends()
                stepper.push(state, num_steps_run)
                if stepper.has_ended():
                    call.data_ended = True
                    break
                if requests.requested:
                    call.was_interrupted = call.left(num_batches) > 0
                    break
                if call.left(num_batches) and self.progress.is_due(step, secs):
                    now = moments.now()
                    # The loop goes on only if there is a batch. After its last step, `end` does what is to be done.
                    if now.is_last or not stepper.has_more(functools.partial(self._before_reading_ahead, now)):
                        call.data_ended = stepper.has_ended()
                        break
                    call.place = "the actions"
                    checks.mark_donated(state, repr(self._loop))  # Somebody may keep it, and the next step takes it.
                    if not moments.hold_inside(state, now):
                        call.was_interrupted = requests.requested
                        break
                    step, secs = moments.next()
                call.place = "the dataset"
            call.place = self._step
            stepper.fetch()
            return state, stepper.ledger.whole_loop()
        except BaseException as error:
            if self.progress.began is None:  # The end of the loop before was passed, and it is in this one.
                self.progress.is_inside, self.progress.began = True, False
            stepper.rescue_outputs(error)
            stepper.count_rescued_step()
            error.add_note(f"in {call.place}, after step {self.progress.steps}, in {self._loop!r}")
            raise
        finally:
            if call.program is not None and call.state is not None:
                self._step.remember(call.state)

    def _observers(self) -> list[Callable[[types.Batch], None]]:
        """Returns what is called with each batch."""
        run, statistics = self.moments.run, self.moments.statistics
        counting = [] if statistics is None else statistics.observers()
        keeps = run is not None and run.keeps_batches and self.stepper.call.trains
        keeping = [self.kept.add] if keeps else []
        return [*self.observers, *counting, *keeping]

    def _before_reading_ahead(self, now: Elapsed) -> None:
        """Called at a moment, while the source stands after the batch of that step."""
        if self.moments.saves_at(now):
            self.stepper.source.mark()

    # Going on where it was -------------------------------------------------------------------------------

    def resume(self, elapsed: Elapsed, batches_before: int = 0) -> None:
        """Goes on counting from where an earlier run, in this process or another, left off.

        Args:
          elapsed: how far that was.
          batches_before: how many batches of the loop under way it had trained on.
        """
        self.progress.resume(elapsed)
        self.moments.last_beginning, self.kept = elapsed.without_previous(), KeptBatches()
        self._forget()
        self.progress.batches_before = batches_before

    def set_loops(self, loops: int) -> None:
        """Goes on with so many loops that have ended."""
        if loops != self.progress.loops:  # What the actions have not seen yet belongs to another run.
            self._forget()
        self.progress.loops, self.progress.is_inside = loops, False
        self.progress.last_elapsed = dataclasses.replace(self.progress.last_elapsed, loops=loops)

    def _forget(self) -> None:
        self.progress.restart_clock()
        self.stepper.ledger = Ledger()
        self.moments.agenda.forget(self.progress.stopwatch.spent())

    def kept_by_step(self) -> dict[int, types.Batch]:
        """Returns the last batches, as the dataset gave them, by their steps."""
        failed, updates, step_num = self.stepper.call.failed_step, self.stepper.call.updates, self.stepper.step_num
        newest = step_num + (updates if failed == step_num + updates else 0)
        batches = list(self.kept.batches)
        first = newest - (len(batches) - 1) * updates
        return dict(zip(range(first, newest + 1, updates), batches, strict=True))

    @property
    def batches_consumed(self) -> int:
        """What `source` had counted when the last whole step was done."""
        return self.stepper.call.consumed

    def batches_ahead(self, source: Any) -> int:
        """Returns how many batches were drawn from a source, and not taken."""
        return self.stepper.batches_ahead(source)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the loop and its actions remember: with the train state, the run up to now.

        To be called between two steps, as an action is.

        Returns:
          What JSON can hold; and, by name, the states that actions keep.
        """
        ledger, progress, moments, trains = self.stepper.ledger, self.progress, self.moments, self.stepper.call.trains
        elapsed, agenda = moments.elapsed, moments.agenda
        # What an evaluation has done by half is done again.
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
            "ledger": ledger.state_dict(self._encode, keeps_loop=trains and agenda.series_read[1]),
            "slots": slots,
            "others": [remembered(action) for action in self._other_actions()],
        }
        return state_dict, kept

    def load_state_dict(self, state_dict: Mapping[str, Any], kept_states: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` of a loop with the same actions returned, in this process or another."""
        elapsed, progress, stepper = Elapsed(**state_dict["elapsed"]), self.progress, self.stepper
        self.resume(elapsed, state_dict["steps_in_loop"])
        progress.last_elapsed = dataclasses.replace(elapsed, previous=Elapsed(**state_dict["previous"]))
        progress.loops, progress.is_ending = state_dict["loop_count"], state_dict["is_ending"]
        if state_dict["has_begun"] or progress.batches_before:
            progress.began = state_dict["wraps_dataset"]
        self.moments.last_beginning = Elapsed(**state_dict["last_beginning"])
        if stepper.steps_per_dispatch is None:  # What was found out then: otherwise the last bits might differ.
            stepper.steps_per_dispatch = state_dict["steps_per_dispatch"]
        stepper.ledger = Ledger.of(state_dict["ledger"])
        self.moments.agenda.load_state_dict(state_dict["slots"], kept_states, self._loop)
        others = matched(self._other_actions(), state_dict["others"], lambda action: action, self._loop)
        for action, kept in others:
            action.load_state_dict(encoding.decode(kept["state"]))

    def end_again(self, state: Any) -> bool:
        """Calls the end actions that were not come to, where one of them raised; returns whether the run goes on."""
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
                "%r has outputs that a checkpoint can't keep: %s. After a resume, an action that is called once in "
                "many steps sees only those of the steps after it.",
                self._loop,
                ", ".join(map(printable, left_out)),
            )
        return encoded


# Batches that are kept for the record of a failure: for as many steps as may be under way, within this many bytes.
_KEPT_BATCHES = 64
_KEPT_BYTES = 256 * 2**20


@final
class KeptBatches:
    """The last batches, for the record of a failure: those of the steps that may be under way, within some bytes.

    Attributes:
      batches: the batches, the newest last.
    """

    def __init__(self):
        self.batches: collections.deque[types.Batch] = collections.deque()

    def add(self, batch: types.Batch) -> None:
        """Keeps a batch, and as many before it as there is room for."""
        if not self.batches:
            size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(batch))
            self.batches = collections.deque(maxlen=min(_KEPT_BATCHES, max(1, _KEPT_BYTES // max(size, 1))))
        self.batches.append(batch)


def _weighted(outputs: Any, weights: Sequence[int]) -> metrics.LoopOutputs:
    """Returns what a hook has made of the outputs of a loop as outputs with these weights."""
    if not isinstance(outputs, metrics.LoopOutputs):
        outputs = metrics.LoopOutputs(outputs)
    outputs.num_examples = list(weights)
    return outputs
