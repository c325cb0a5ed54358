"""Commands for a run in progress, which reads them from files in its work directory and executes them between steps."""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from absl import logging
from etils import epath

from jaxloop.actions.action import Action
from jaxloop.actions.profile_action import ProfileAction
from jaxloop.base import files
from jaxloop.base.text import printable
from jaxloop.engine.agenda import ActionItem, Agenda, Item, Moment, Rank
from jaxloop.history import History
from jaxloop.processes import agreement, interrupt
from jaxloop.runs import accounts
from jaxloop.schedules import Elapsed, Schedule, at, every, last, never

DIRECTORY = "commands"
"""The name of the subdirectory in a work directory that contains pending commands."""

ANSWERS = "commands.jsonl"
"""The name of the file in a work directory that records executed and rejected commands."""

_POLL_SECS = 1.0
_FILE = re.compile(r"[0-9]{1,20}-[0-9a-f]{16}\.json")
_COMMAND = re.compile(r"(?P<name>[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)?)(=(?P<value>.*))?")
_MAX_BYTES = 4096
_MAX_AT_ONCE = 64


@final
@dataclasses.dataclass(frozen=True)
class Answer:
    """A run's answer to a command.

    Attributes:
      id: The name of the command's file, without the suffix.
      command: The command, such as "save".
      step: The number of completed updates when the command was executed or rejected.
      error: The reason the command was rejected; None if it was executed.
    """

    id: str
    command: str
    step: int
    error: str | None = None

    def __str__(self) -> str:
        result = "done" if self.error is None else f"rejected: {self.error}"
        return printable(f"{self.command}: {result} (step {self.step:,})")


def tell(workdir: epath.PathLike, command: str, wait_secs: float = 30.0) -> Answer | None:
    """Sends a command to the run in a work directory, and waits for the run's answer.

    - `save`: saves a checkpoint.
    - `stop`: saves a checkpoint and ends the run, like Ctrl-C.
    - `profile=5`: records a profile of the next 5 steps in `<workdir>/profile`.
    - `log_every=10`: adds a row to the history now and every 10 steps.
    - `summary.interval=100`: calls one of the train loop's end actions now and every 100 steps.
    - `early_stopping.patience=5`: changes one of an action's `settings`.

    Actions are named after their classes: `early_stopping` is the `EarlyStoppingAction`, and `summary_2` is the second
    `SummaryAction`.

    The run executes the command between two steps: after the next log point or within a second, whichever comes first.
    It records the command in the history and in its checkpoints, so a resumed run keeps the changed settings.

    >>> import tempfile
    >>> tell(tempfile.mkdtemp(), "save now")
    Traceback (most recent call last):
    ValueError: A command is a name, or a name=value, got 'save now'.

    Args:
      workdir: The work directory of an `OuterLoop` that is training.
      command: The command.
      wait_secs: Seconds to wait for the answer.

    Returns:
      The answer, or None if it didn't arrive in time. In that case, the run may still execute the command later.

    Raises:
      FileNotFoundError: If the directory doesn't contain a run log.
      ValueError: If the command is malformed, or the run has ended.
    """
    parse(command)
    newest = accounts.read_attempts(workdir)[-1]
    if newest.reason is not None:
        raise ValueError(f"The run in {workdir} has ended: {newest.reason}.")
    if newest.described.get("host") == socket.gethostname() and not newest.is_alive():
        raise ValueError(f"The run in {workdir} was killed. Start it again first.")
    directory = files.absolute(workdir) / DIRECTORY
    files.make_directory(directory)
    name = f"{time.time_ns()}-{secrets.token_hex(8)}"
    path = os.path.join(directory, f"{name}.json")
    with files.open_file(f"{path}.new", "w") as file:
        json.dump({"command": command}, file)
    os.rename(f"{path}.new", path)
    deadline = time.monotonic() + wait_secs
    while True:
        answer = next((each for each in answers(workdir) if each.id == name), None)
        if answer is not None or time.monotonic() >= deadline:
            return answer
        time.sleep(0.1)


def answers(workdir: epath.PathLike) -> list[Answer]:
    """Returns the answers recorded in a work directory, oldest first. Malformed lines are skipped."""
    path, found = files.absolute(workdir) / ANSWERS, []
    for line in files.read_bytes(path).splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError):
            answer = Answer(**files.parse_json(line))
            if type(answer.step) is int and all(isinstance(each, str) for each in (answer.id, answer.command)):
                found.append(answer)
    return found


def parse(command: str) -> tuple[str, Any]:
    """Splits a command into its name and value. The value is None if the command doesn't have one.

    >>> parse("early_stopping.patience=5"), parse("save")
    (('early_stopping.patience', 5), ('save', None))

    Raises:
      ValueError: If the command is malformed.
    """
    match = _COMMAND.fullmatch(command) if isinstance(command, str) and len(command) <= 200 else None
    if match is None:
        raise ValueError(f"A command is a name, or a name=value, got {printable(str(command)[:200])!r}.")
    text = match["value"]
    try:
        value = text if text is None else files.parse_json(text)
    except ValueError:
        value = text
    if isinstance(value, list | dict):
        raise ValueError(f"The value of a command is a number, a string or a boolean, got {printable(text)}.")
    return match["name"], value


@final
class Commands(Item):
    """Executes the commands sent to a training run.

    Once per second, a thread in the first process looks for files in `<workdir>/commands`; `poll` does the same at log
    points. If a file is found, all processes pause at the same step, after the current dispatch. The first process
    reads the files, and all processes execute the commands in file-name order. Each executed command and its step are
    appended to `<workdir>/commands.jsonl`. If the run is killed and resumes from a checkpoint that was saved before a
    command, the command is executed again at the same step.

    Malformed, oversized and non-regular files have no effect.

    Args:
      workdir: The work directory. If it is None or remote, the run doesn't accept commands.
      job: The processes that train together.
      agenda: The train loop's agenda.
      actions: The actions of all loops. Commands can change their settings.
      recorder: The action that adds training rows to the history.
      history: The history. Each executed command is added to it.
    """

    name = "commands"

    def __init__(
        self,
        workdir: epath.PathLike | None,
        job: agreement.Job,
        agenda: Agenda,
        actions: Sequence[Action],
        recorder: Action,
        history: History,
    ):
        super().__init__(Rank.COMMAND)
        has_files = workdir is not None and not files.is_remote(workdir)
        self._workdir = files.absolute(workdir) if has_files else None
        self._job, self._agenda, self._recorder, self._history = job, agenda, recorder, history
        self._actions = _named(actions)
        self._executed: list[Answer] = []
        self._replayed: list[Answer] = []  # Executed after the checkpoint that the run resumed from.
        self._profiles: list[ProfileAction] = []
        self._unusable: set[str] = set()  # Files that can't be removed.
        self._has_ended = threading.Event()
        self._started = time.time_ns()

    @contextlib.contextmanager
    def polling(self) -> Iterator[None]:
        """Polls for commands while the context is active. Commands sent before or after the run are rejected."""
        if self._workdir is None or not self._job.is_first:
            yield
            return
        self._reject([each for each in self._pending() if int(each.partition("-")[0]) < self._started])
        thread = threading.Thread(target=self._poll_regularly, name="jaxloop-commands", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            thread.join()
            self._reject(self._pending())
            for each in self._profiles:
                each.close()

    def poll(self) -> None:
        """Requests a pause of the run if any commands are pending."""
        if self._workdir is not None and self._job.is_first and self._pending():
            self._requests.request_pause()

    def _poll_regularly(self) -> None:
        while not self._has_ended.wait(_POLL_SECS):
            self.poll()

    @property
    def _requests(self) -> interrupt.Interruptible:
        return self._job.requests.outermost

    # Executing -------------------------------------------------------------------------------------------

    @property
    def interval(self) -> Schedule:
        """A schedule that fires at the step of the next command to re-execute."""
        return at(self._replayed[0].step) if self._replayed else never()

    def is_due(self, now: Elapsed, loop: int | None) -> bool:
        return self._requests.pauses or bool(self._replayed and self._replayed[0].step <= now.steps)

    def call(self, moment: Moment) -> bool:
        """Executes the commands that are due. All processes must call this after the same step."""
        now = moment.now
        while self._replayed and self._replayed[0].step <= now.steps:
            with _warning_of_error():  # The program may have different actions now.
                self._execute(self._replayed.pop(0), now)
        if not self._requests.pauses:
            return True
        self._requests.end_pause()
        pending = self._pending()[:_MAX_AT_ONCE] if self._job.is_first else []
        for name, command in self._job.gather([(name, self._read(name)) for name in pending])[0]:
            answer = Answer(name, command, now.steps)
            try:
                self._execute(answer, now)
            except ValueError as error:
                answer = dataclasses.replace(answer, error=str(error))
                logging.warning("The command %s", answer)
            if self._job.is_first:
                self._answer(answer)
        return True

    def _execute(self, answer: Answer, now: Elapsed) -> None:
        """Executes a command.

        Raises:
          ValueError: If the command is unknown or has an invalid value. In that case, nothing is changed.
        """
        name, value = _target(answer.command)
        action, _, setting = name.partition(".")
        items = self._items()
        if name == "save" and value is None:
            savers = [item for item in self._agenda.items if item.rank == Rank.SAVE]
            if not savers:
                raise ValueError("The train loop has no CheckpointAction.")
            for item in savers:
                item.is_requested = True
        elif name == "stop" and value is None:
            self._requests.confirm(interrupt.STOP)
        elif name == "profile" and _is_count(value):
            self._attach_profile(answer)
        elif setting == "interval" and action in items and _is_count(value):
            items[action].is_requested, items[action].next_interval = True, _interval(value)
        elif setting in self._settings(action):
            self._actions[action].change(setting, value)
        else:
            raise ValueError(f"Unknown command or invalid value. Known: {', '.join(self._known(items))}.")
        logging.info("Executed the command %r after step %d.", printable(answer.command), now.steps)
        self._executed.append(answer)
        self._history.commit(now, {"command": answer.command})

    def _attach_profile(self, answer: Answer) -> None:
        assert self._workdir is not None
        action = ProfileAction(self._workdir / "profile", answer.step + 2, _target(answer.command)[1])
        self._profiles.append(action)
        self._agenda.add(ActionItem(action, lambda now: {}))

    def _settings(self, action: str) -> Sequence[str]:
        return self._actions[action].settings if action in self._actions else ()

    def _items(self) -> dict[str, ActionItem]:
        """Returns the items of the train loop's end actions by name. "history" is the one that adds history rows."""
        items = {id(item.action): item for item in self._agenda.items if isinstance(item, ActionItem)}
        named = {"history": self._recorder, **self._actions}
        return {name: items[id(action)] for name, action in named.items() if id(action) in items}

    def _known(self, items: Mapping[str, ActionItem]) -> list[str]:
        intervals = [f"{name}.interval=N" for name in items if name != "history"]
        settings = [f"{name}.{each}=X" for name in self._actions for each in self._settings(name)]
        return ["save", "stop", "profile=N", "log_every=N", *intervals, *settings]

    # Saving and resuming ---------------------------------------------------------------------------------

    def forget(self) -> None:
        """Appends `.before` to the name of an earlier run's answers file, if the work directory has one."""
        if self._workdir is not None and self._job.is_first:
            path = self._workdir / ANSWERS
            with contextlib.suppress(FileNotFoundError):
                os.replace(path, f"{path}.before")

    def executed(self) -> list[dict[str, Any]]:
        """Returns the executed commands, to be stored in a checkpoint."""
        return [dataclasses.asdict(each) for each in self._executed]

    def repeat(self, executed: Sequence[Mapping[str, Any]], step: int) -> None:
        """Reapplies the commands executed before a checkpoint, and schedules the later ones for re-execution.

        Args:
          executed: The result of `executed`.
          step: The checkpoint's step.
        """
        self._executed = [Answer(**each) for each in executed]
        items = self._items()
        for answer in self._executed:
            name, value = _target(answer.command)
            action, _, setting = name.partition(".")
            if setting == "interval" and action in items:
                items[action].reschedule(_interval(value))
            elif setting in self._settings(action):
                with _warning_of_error():
                    self._actions[action].change(setting, value)
            elif name == "profile":  # Even if it is complete, because the checkpoint contains its action's state.
                self._attach_profile(answer)
        lines = answers(self._workdir) if self._workdir is not None and self._job.is_first else []
        lines = self._job.gather([dataclasses.asdict(each) for each in lines])[0]
        known = {answer.id for answer in self._executed}
        later = [each for each in (Answer(**each) for each in lines) if each.error is None and each.step >= step]
        self._replayed = sorted((each for each in later if each.id not in known), key=lambda each: each.step)

    # Files -----------------------------------------------------------------------------------------------

    def _pending(self) -> list[str]:
        """Returns the file names of the pending commands, in order and without suffixes."""
        assert self._workdir is not None
        directory = self._workdir / DIRECTORY
        with contextlib.suppress(OSError):
            if not os.path.islink(directory):
                names = sorted(name for name in os.listdir(directory) if _FILE.fullmatch(name))
                return [name.removesuffix(".json") for name in names if name not in self._unusable]
        return []

    def _reject(self, names: Sequence[str]) -> None:
        for name in names:
            self._answer(Answer(name, self._read(name), 0, "It was not given during the run."))

    def _read(self, name: str) -> str:
        """Returns the command in a file, or "" if the file is malformed, too large or not a regular file."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            command = files.parse_json(files.read_bytes(self._path(name), max_bytes=_MAX_BYTES))["command"]
            parse(command)
            return command
        return ""

    def _answer(self, answer: Answer) -> None:
        """Appends an answer to the answers file, and deletes the command's file."""
        assert self._workdir is not None
        try:
            with files.open_file(self._workdir / ANSWERS, "a") as file:
                file.write(json.dumps(dataclasses.asdict(answer)) + "\n")
        except OSError as error:
            logging.warning("The answer to the command %s was not written: %s", answer, error)
        try:
            os.unlink(self._path(answer.id))
        except FileNotFoundError:
            pass
        except OSError:
            self._unusable.add(f"{answer.id}.json")

    def _path(self, name: str) -> epath.Path:
        assert self._workdir is not None
        return self._workdir / DIRECTORY / f"{name}.json"


@contextlib.contextmanager
def _warning_of_error() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        logging.warning("A command that was given before the run was resumed has been dropped: %s", error)


def _named(actions: Sequence[Action]) -> dict[str, Action]:
    """Returns actions by name, such as `early_stopping`, or `early_stopping_2` for the second action of a class."""
    named: dict[str, Action] = {}
    for action in actions:
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", type(action).__name__.removesuffix("Action") or "action")
        name = first = "_".join(words).lower()
        number = 1
        while name in named:
            number += 1
            name = f"{first}_{number}"
        named[name] = action
    return named


def _target(command: str) -> tuple[str, Any]:
    """Splits a command into its name and value, like `parse`, but renames `log_every` to `history.interval`."""
    name, value = parse(command)
    return ("history.interval" if name == "log_every" else name), value


def _interval(steps: int) -> Schedule:
    return every(steps=steps) | last()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31
