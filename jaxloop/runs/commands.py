"""Commands for a run in progress, which are stored as files in its work directory and executed between steps."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop.actions.action import Action
from jaxloop.base import files
from jaxloop.base.text import printable
from jaxloop.distributed import agreement, interrupt
from jaxloop.engine.agenda import Agenda, Item, Moment, Rank
from jaxloop.outer_loop.extension import Experiment, Extension
from jaxloop.runs import run_log
from jaxloop.schedules import Elapsed, every, last

DIRECTORY = "commands"
"""The name of the subdirectory in a work directory that contains pending commands."""

ANSWERS = "commands.jsonl"
"""The name of the file in a work directory that records executed and rejected commands."""

_POLL_SECS = 1.0
_FILE = re.compile(r"[0-9]{1,20}-[0-9a-f]{16}\.json")
_COMMAND = re.compile(r"(?P<name>[a-z][a-z0-9_]*(\.interval)?)(=(?P<number>[1-9][0-9]{0,8}))?")
_MAX_BYTES = 4096


@final
@dataclasses.dataclass(frozen=True)
class Answer:
    """A run's answer to a command.

    Attributes:
      id: The name of the command's file, without the suffix.
      command: The command, such as "save".
      step: The number of updates that had been completed when the command was executed or rejected. 0 if the command
        was not given during a run.
      error: The reason why the command was rejected, or None if it was executed.
    """

    id: str
    command: str
    step: int
    error: str | None = None

    def __str__(self) -> str:
        result = "done" if self.error is None else f"rejected: {self.error}"
        return printable(f"{self.command}: {result} (step {self.step:,})")


def tell(workdir: epath.PathLike, command: str, wait_secs: float = 30.0) -> Answer | None:
    """Sends a command to the run in a work directory and waits for the run's answer.

    - `save`: saves a checkpoint.
    - `stop`: saves a checkpoint and ends the run, like Ctrl-C.
    - `log_every=10`: adds a row to the history now, every 10 steps and at the end of the run.
    - `summary.interval=100`: calls an end action of the train loop (here, the `SummaryAction`) now, every 100 steps and
      at the end of the run.

    Actions are named after their classes: `summary_2` is the second `SummaryAction`.

    The run executes the command between two steps: after the next log point or within a second, whichever comes first.
    The run also records the command in its history and checkpoints, so a resumed run keeps the changed intervals.

    >>> import tempfile
    >>> tell(tempfile.mkdtemp(), "save now")
    Traceback (most recent call last):
    ValueError: A command is a name, or name=N with a positive number N, got 'save now'.

    Args:
      workdir: The work directory of an `OuterLoop` that is training.
      command: The command.
      wait_secs: The maximum number of seconds to wait for the answer.

    Returns:
      The answer, or None if it didn't arrive in time. In that case, the run may still execute the command later.

    Raises:
      FileNotFoundError: If the directory doesn't contain a run log.
      ValueError: If the command is malformed, or the run has ended.
    """
    parse(command)
    state = run_log.read(workdir)[-1].state
    if state not in ("running", "silent"):
        raise ValueError(f"The run in {workdir} has ended: {state}.")
    directory = files.absolute(workdir) / DIRECTORY
    files.make_directory(directory)
    name = f"{time.time_ns()}-{secrets.token_hex(8)}"
    files.write_atomically(directory / f"{name}.json", json.dumps({"command": command}).encode())
    deadline = time.monotonic() + wait_secs
    while True:
        answer = next((each for each in answers(workdir) if each.id == name), None)
        if answer is not None or time.monotonic() >= deadline:
            return answer
        time.sleep(0.1)


def answers(workdir: epath.PathLike) -> list[Answer]:
    """Returns the answers recorded in a work directory, oldest first. Malformed lines are skipped."""
    found = []
    for line in run_log.read_lines(files.absolute(workdir) / ANSWERS):
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
            found.append(Answer(str(line["id"]), str(line["command"]), int(line["step"]), line["error"]))
    return found


def parse(command: str) -> tuple[str, int | None]:
    """Splits a command into its name and number. The number is None if the command has none.

    >>> parse("summary.interval=100"), parse("save")
    (('summary.interval', 100), ('save', None))

    Raises:
      ValueError: If the command is malformed.
    """
    match = _COMMAND.fullmatch(command)
    if match is None or len(command) > 200:
        shown = printable(command[:200])
        raise ValueError(f"A command is a name, or name=N with a positive number N, got {shown!r}.")
    return match["name"], None if match["number"] is None else int(match["number"])


@final
class Tell(Extension):
    """Lets an `OuterLoop` execute the commands sent with `tell`.

    The `OuterLoop` must have a train loop and a local work directory; otherwise, this extension does nothing.

    Once per second, and at every log point, the first process looks for files in `<workdir>/commands`. If there are
    any, all processes pause at the same step, after the current dispatch. The first process reads the files. All
    processes then execute the commands in the order of the file names. If the train loop has a `CheckpointAction`, they
    also save a checkpoint. The answer to each command is appended to `<workdir>/commands.jsonl`. Malformed, oversized
    and non-regular files have no effect on the run.
    """

    name = "commands"

    def __init__(self):
        self._commands: Commands | None = None

    def begin(self, experiment: Experiment) -> Sequence[Item]:
        workdir, trains = experiment.local_workdir, experiment.train_loop is not None
        self._commands = Commands(experiment, workdir) if trains and workdir is not None else None
        return () if self._commands is None else (self._commands,)

    def moment(self, now: Elapsed) -> None:
        if self._commands is not None:
            self._commands.poll()

    def end(self, now: Elapsed, reason: str, error: BaseException | None) -> None:
        if self._commands is not None:
            self._commands.end()


@final
class Commands(Item):
    """The agenda item that executes the commands sent to a run.

    Args:
      experiment: The experiment.
      workdir: The work directory of the experiment.
    """

    name = "commands"

    def __init__(self, experiment: Experiment, workdir: epath.Path):
        super().__init__(Rank.COMMAND)
        self._experiment, self._actions = experiment, _named(experiment.actions)
        self._changes: list[str] = []  # The commands that have changed intervals so far.
        self._inbox = _Inbox(workdir)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._poll_regularly, name="jaxloop-commands", daemon=True)
        if self._job.is_first:
            self._inbox.reject_pending()
            self._thread.start()

    def poll(self) -> None:
        """Looks for pending commands and, if there are any, asks the run to pause."""
        if self._job.is_first and self._inbox.pending():
            self._job.requests.outermost.request_pause()

    def _poll_regularly(self) -> None:
        while not self._has_ended.wait(_POLL_SECS):
            self.poll()

    def end(self) -> None:
        """Stops polling and rejects the commands that are still pending."""
        self._has_ended.set()
        if self._job.is_first:
            self._thread.join()
            self._inbox.reject_pending()

    @property
    def _job(self) -> agreement.Job:
        return self._experiment.loops[0].engine.job

    # Executing -------------------------------------------------------------------------------------------

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        return self._job.requests.outermost.pauses

    def call(self, moment: Moment) -> bool:
        """Executes the pending commands. All processes must call this method after the same step."""
        now, savers = moment.now, [item for item in self._agenda.items if item.rank == Rank.SAVE]
        self._job.requests.outermost.end_pause()
        pending = self._inbox.pending() if self._job.is_first else []
        for name, command in self._job.gather([(name, self._inbox.read(name)) for name in pending])[0]:
            answer = Answer(name, command, now.steps)
            try:
                self._execute(command, now, savers)
            except (AttributeError, ValueError) as error:  # `AttributeError` if the interval is a property.
                answer = dataclasses.replace(answer, error=str(error))
                logging.warning("The command %s", answer)
            if self._job.is_first:
                self._inbox.answer(answer)
        return True

    def _execute(self, command: str, now: Elapsed, savers: Sequence[Item]) -> None:
        """Executes a command and requests a checkpoint, so that a resumed run keeps any changes made by the command.

        Raises:
          ValueError: If the command is unknown or has an invalid value. In that case, nothing is changed.
        """
        name, number = parse(command)
        requested: list[Item] = [*savers]
        if command == "save":
            if not savers:
                raise ValueError("The train loop has no CheckpointAction.")
        elif command == "stop":
            self._job.requests.outermost.confirm(interrupt.STOP)
        else:
            requested.append(self._change(name, number))
            self._changes.append(command)
        for item in requested:
            item.is_requested = True
        logging.info("Executed the command %r after step %d.", printable(command), now.steps)
        self._experiment.history.commit(now, {"command": command})

    def _change(self, name: str, number: int | None) -> Item:
        """Makes an item due every `number` steps and at the end of the run. `name` is the name of the command.

        Returns the item, so that the caller can also request that the item be called at the current step.

        Raises:
          ValueError: If no item belongs to the command `name`, or if `number` is None.
        """
        items = self._items()
        if name not in items or number is None:
            known = ["save", "stop", *(f"{each}=N" for each in items)]
            raise ValueError(f"Unknown command. Known: {', '.join(known)}.")
        owner: Any = getattr(items[name], "action", items[name])
        owner.interval = every(steps=number) | last()
        return items[name]

    def state_dict(self) -> Mapping[str, Any]:
        return {"changes": self._changes} if self._changes else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._changes = saved.get("changes", [])
        for command in self._changes:  # Repeats the changes that were made before the checkpoint was saved.
            try:
                self._change(*parse(command))
            except ValueError as error:  # The program may have different actions now.
                logging.warning("A command that was given before the run was resumed has been dropped: %s", error)

    @property
    def _agenda(self) -> Agenda:
        return self._experiment.loops[0].engine.run.agenda

    def _items(self) -> dict[str, Item]:
        """Returns the items whose intervals can be changed, keyed by the names of the commands that change them."""
        names = {id(action): f"{name}.interval" for name, action in self._actions.items()}
        own = lambda item: "log_every" if item.rank == Rank.ROW else names.get(id(getattr(item, "action", None)))
        named = {own(item): item for item in self._agenda.called_here}
        return {name: item for name, item in named.items() if name is not None}


@final
class _Inbox:
    """The files in a work directory that contain commands and answers."""

    def __init__(self, workdir: epath.Path):
        self._workdir = workdir
        self._answered: set[str] = set()

    def pending(self) -> list[str]:
        """Returns the file names of the pending commands, sorted and without suffixes."""
        directory = self._workdir / DIRECTORY
        with contextlib.suppress(OSError):
            if not os.path.islink(directory):
                names = [name.removesuffix(".json") for name in os.listdir(directory) if _FILE.fullmatch(name)]
                return sorted({*names} - self._answered)
        return []

    def read(self, name: str) -> str:
        """Returns the command in a file, or "" if the file is malformed, too large or not a regular file."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            command = files.parse_json(files.read_bytes(self._path(name), max_bytes=_MAX_BYTES))["command"]
            parse(command)
            return command
        return ""

    def reject_pending(self) -> None:
        """Rejects all pending commands. Called before the first step and after the last step of a run."""
        for name in self.pending():
            self.answer(Answer(name, self.read(name), 0, "It was not given during the run."))

    def answer(self, answer: Answer) -> None:
        """Appends an answer to the answers file, and deletes the command's file."""
        self._answered.add(answer.id)
        try:
            with files.open_file(self._workdir / ANSWERS, "a") as file:
                file.write(json.dumps(dataclasses.asdict(answer)) + "\n")
        except OSError as error:
            logging.warning("The answer to the command %s was not written: %s", answer, error)
        with contextlib.suppress(OSError):
            os.unlink(self._path(answer.id))

    def _path(self, name: str) -> epath.Path:
        return self._workdir / DIRECTORY / f"{name}.json"


def _named(actions: Sequence[Action]) -> dict[str, Action]:
    """Returns a dict of the actions, keyed by name.

    Two actions of the same class have names such as `early_stopping` and `early_stopping_2`.
    """
    named: dict[str, Action] = {}
    for action in actions:
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", type(action).__name__.removesuffix("Action") or "action")
        name = "_".join(words).lower()
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        named[next(each for each in itertools.chain([name], numbered) if each not in named)] = action
    return named
