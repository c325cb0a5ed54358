"""Extensions, such as the run log and the watchdog, which observe a run without taking part in its computation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop import types
from jaxloop.action_loop import ActionLoop
from jaxloop.actions.action import Action
from jaxloop.actions.checkpoint_action import CheckpointAction
from jaxloop.base import checks, encoding, files
from jaxloop.engine.agenda import Item, Moment, Rank
from jaxloop.history import History
from jaxloop.outer_loop.specs import CheckpointSpec, RunSpec
from jaxloop.schedules import Elapsed


class Extension:
    """Observes the runs of an `OuterLoop` without taking part in their computation. An extension can also end a run.

    >>> import jaxloop
    >>> from jaxloop import examples
    >>> class Announce(Extension):
    ...     def end(self, now, reason, error):
    ...         print(f"The run is over at step {now.steps}: {reason}")
    >>> step, state, batches = examples.tiny_regression()
    >>> outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(step), extensions=[Announce()])
    >>> _ = outer_loop(state, batches)
    The run is over at step 100: finished

    Hooks:
      name: The name under which checkpoints store the extension's state; by default, the name of the class.
      begin: Called when a run begins, and again when it returns to an earlier checkpoint.
      batch: Called with each training batch, normally before the batch's step.
      moment: Called before the run's first step, after a checkpoint (if any) has been restored. Also called after each
        step at which a history row, an action or an evaluation may be due. Not called in runs that don't train.
      end: Called when the run has ended, for any reason, and all checkpoints have been written to disk. Also called
        before the run returns to an earlier checkpoint.
      state_dict, load_state_dict: Called to save the extension's state in a checkpoint and to restore it.
    """

    name: str = ""

    def begin(self, experiment: "Experiment") -> Sequence[Item] | None:
        """Starts observing a run. Returns items for the run to call when they are due (see `Item`), or None.

        Called before a checkpoint is restored, so the first step isn't known yet.

        Args:
          experiment: The experiment that is about to run.
        """

    def batch(self, batch: types.Batch, step_num: int) -> None:
        """Observes a training batch as returned by the dataset.

        Called before the step or, if several steps are dispatched together, after the dispatch. An error raised by this
        hook ends the run.

        Args:
          batch: The batch.
          step_num: The number of completed updates after the step that uses the batch. If that step fails, a resumed
            run repeats it, so the hook may be called again with the same number.
        """

    def moment(self, now: Elapsed) -> None:
        """Observes the run's progress, possibly more than once per step. An error raised by this hook ends the run."""

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        """Observes the end of a run. An error raised by this hook is logged.

        Args:
          now: The run's progress.
          reason: The reason why the run ended: "finished", "stopped by X" (where X is the class of the action that
            stopped it), "stopped" (if it was stopped by something other than an action, such as the step), "stopped by
            a command", "Ctrl-C", "SIGTERM", "a detour" (if the run returns to an earlier checkpoint), "hang: ..." or
            "error: ...".
          error: The exception that ended the run, or None.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the state to store in a checkpoint: a dict of numbers, strings, arrays, lists and dicts."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores the extension from the result of `state_dict`. Not called if the checkpoint has no state for it."""


@final
class Extensions:
    """The extensions of an `OuterLoop`. An error raised by an extension gets a note with the extension's name.

    Raises:
      TypeError: If one of the extensions is not an `Extension`.
      ValueError: If two extensions have the same name.
    """

    def __init__(self, extensions: Sequence[Extension]):
        for each in extensions:
            if not isinstance(each, Extension):
                raise TypeError(f"OuterLoop.extensions must contain Extensions, got {each!r}.")
        names = [each.name or type(each).__name__ for each in extensions]
        self._by_name = dict(zip(names, extensions, strict=True))
        if len(self._by_name) < len(names):
            raise ValueError(f"Two extensions have the same name: {checks.listed(names)}. Give each a different one.")
        overrides = functools.partial(checks.is_overridden, base=Extension)
        self._hooks = {  # The hooks that are overridden, by the name of the extension.
            hook: {name: getattr(each, hook) for name, each in self._by_name.items() if overrides(each, hook)}
            for hook in ("batch", "moment", "state_dict", "load_state_dict")
        }
        self._begun: list[Extension] = []
        self._step_num = self._updates = 0  # The step of the latest batch; the updates per batch.

    def begin(self, experiment: "Experiment") -> list[Item]:
        """Calls `begin` on all extensions and returns the items that they add to the run."""
        items, self._begun = list[Item](), []
        self._updates = experiment.loops[0].step.updates_per_step
        for each in self._by_name.values():
            self._begun.append(each)
            items += _call(each.begin, experiment) or ()
        return [*items, *([_EachMoment(self.moment)] if self._hooks["moment"] else [])]

    @property
    def observers(self) -> list[Callable[[types.Batch], None]]:
        """The functions to call with each training batch."""
        return [self._observe] if self._hooks["batch"] else []

    def _observe(self, batch: types.Batch) -> None:
        self._step_num += self._updates
        for observe in self._hooks["batch"].values():
            _call(observe, batch, self._step_num)

    def moment(self, now: Elapsed) -> None:
        """Reports the run's progress to all extensions."""
        self._step_num = now.steps
        for observe in self._hooks["moment"].values():
            _call(observe, now)

    def end(self, now: Elapsed, reason: str, error: BaseException | None, but: Extension | None = None) -> None:
        """Reports the end of the run to all extensions whose `begin` was called, except `but`, in reverse order."""
        begun, raised = [each for each in self._begun if each is not but], None
        self._begun = [each for each in self._begun if each is but]
        for each in reversed(begun):
            try:
                each.end(now, reason, error)
            except Exception:
                logging.exception("The extension %s failed at the end of the run.", type(each).__name__)
            except BaseException as another:  # The others must end, too.
                raised = raised or another
        if raised is not None:
            raise raised

    def state_dict(self, *, in_moment: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns two dicts to store in a checkpoint; see `Saveable.state_dict`.

        The first dict maps the names of the extensions to their states. Extensions without a state are left out. The
        second dict is empty.
        """
        states = {name: _call(hook) for name, hook in self._hooks["state_dict"].items()}
        return {name: encoding.encode(state) for name, state in states.items() if state}, {}

    def load_state_dict(self, saved: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
        """Restores the states of the extensions from the two dicts that `state_dict` returned."""
        for name, load in self._hooks["load_state_dict"].items():
            if name in saved:
                _call(load, encoding.decode(saved[name]))


def _call(hook: Callable[..., Any], *args: Any) -> Any:
    """Calls an extension's hook. If the hook raises an error, adds a note with the hook's name."""
    try:
        return hook(*args)
    except BaseException as error:
        error.add_note(f"in {getattr(hook, '__qualname__', hook)}, an extension")
        raise


@final
class _EachMoment(Item):
    """An agenda item that reports the run's progress to the extensions. It is due whenever another item may be due."""

    name = "extensions"

    def __init__(self, observe: Callable[[Elapsed], None]):
        super().__init__(Rank.AFTER_EVALUATIONS)
        self._observe = observe

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        return True

    def call(self, moment: Moment) -> bool:
        self._observe(moment.now)
        return True


@final
@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of an `OuterLoop`, together with the arguments of one call.

    Attributes:
      train_loop: The train loop, or None if the experiment only evaluates.
      eval_loops: One loop for each `EvalSpec`.
      checkpoint_spec: The checkpoints that the experiment resumes from or evaluates; None if it doesn't read any
        checkpoints.
      workdir: The directory for the files of the run, or None.
      savers: The actions that save checkpoints.
      history: The history.
      extensions: The extensions.
      spec: The arguments of the call.
    """

    train_loop: ActionLoop | None
    eval_loops: Sequence[ActionLoop]
    checkpoint_spec: CheckpointSpec | None
    workdir: epath.Path | None
    savers: Sequence[CheckpointAction]
    history: History
    extensions: Extensions
    spec: RunSpec = dataclasses.field(default_factory=RunSpec)

    @functools.cached_property
    def loops(self) -> list[ActionLoop]:
        """The train loop (if any) and the eval loops."""
        return [loop for loop in (self.train_loop, *self.eval_loops) if loop is not None]

    @functools.cached_property
    def in_loops(self) -> list[Action]:
        """The actions of all loops and of their steps."""
        return [each for loop in self.loops for each in loop.actions]

    @functools.cached_property
    def actions(self) -> list[Action]:
        """All actions of the experiment, without duplicates."""
        return list(dict.fromkeys([*self.in_loops, *self.savers]))

    @functools.cached_property
    def checkpoint_dirs(self) -> list[epath.Path]:
        """The directories that the run saves checkpoints to or resumes from. Empty if there is no train loop."""
        found, spec = [action.directory for action in self.savers], self.checkpoint_spec
        found += [] if spec is None or self.train_loop is None else [spec.checkpoint_dir]
        return list(dict.fromkeys(found))

    @functools.cached_property
    def directories(self) -> list[epath.Path]:
        """The directories that the run writes to: its checkpoint directories and its work directory."""
        return list(dict.fromkeys([*self.checkpoint_dirs, *([] if self.workdir is None else [self.workdir])]))

    @functools.cached_property
    def reports_dir(self) -> epath.Path | None:
        """The directory for reports about failures and hangs; None if there is neither a `workdir` nor any `savers`."""
        return self.workdir or next((action.directory for action in self.savers), None)

    @functools.cached_property
    def local_workdir(self) -> epath.Path | None:
        """The work directory if there is one and it is local; otherwise None."""
        return None if self.workdir is None or files.is_remote(self.workdir) else self.workdir
