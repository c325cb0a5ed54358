"""The history of a run: rows of metrics, in memory and in a file, and learning curves."""

import array
import bisect
import dataclasses
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from jax import core

from jaxloop import metrics
from jaxloop.base import checks, files
from jaxloop.base.text import printable
from jaxloop.schedules import Elapsed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY_FILE = "history.jsonl"
"""The name of the history's file in the work directory. Each line contains one row."""

# The maximum number of rows whose values are still on the devices.
_MAX_PENDING_ROWS = 64
_UNITS: tuple[str, ...] = ("steps", "samples", "time", "loops")
# A curve with at most this many points has a marker at each point.
_FEW_POINTS = 30
_AXES_IN_A_LINE = 4


@final
class Row(NamedTuple):
    """One row of a history.

    Attributes:
      elapsed: The progress of the run.
      logs: The metrics: a (nested) dict of Python numbers and strings, with the keys passed to `History.commit`.
    """

    elapsed: Elapsed
    logs: dict[str, Any]


@dataclasses.dataclass
class _Column:
    """The values of one path, and their row numbers in ascending order."""

    rows: "array.array[int]" = dataclasses.field(default_factory=lambda: array.array("q"))
    values: list[Any] = dataclasses.field(default_factory=list)

    def place(self, number: int) -> int:
        """Returns the index at which a row's value is stored."""
        return bisect.bisect_left(self.rows, number)

    def put(self, number: int, value: Any) -> None:
        """Replaces the value of a row."""
        self.values[self.place(number)] = value


class _Form:
    """The form shared by all rows whose logs have the same keys and value types, in the same order.

    Attributes:
      paths: The paths of the values.

    Raises:
      TypeError: If a value is not a scalar, or a key is not a string.
      ValueError: If two values have the same path, or a path is the name of a field of `elapsed`.
    """

    def __init__(self, logs: Mapping[str, Any]):
        self.paths: list[str] = []
        self._from_devices: list[tuple[str, int]] = []  # Paths and indices.
        self._keys = self._checked(logs, "")

    def _checked(self, logs: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        """Records the path of each value, with a prefix, and returns the nested keys."""
        keys: dict[str, Any] = {}
        for key, value in logs.items():
            if not isinstance(key, str):
                raise TypeError(f"The keys of a history's logs must be strings, got {key!r}. Write {str(key)!r}.")
            path = prefix + _dotted(key)
            if isinstance(value, Mapping):
                keys[key] = self._checked(value, f"{path}.")
                continue
            if path in self.paths:
                raise ValueError(f"The logs have two values under the path {printable(path)}. Rename one of them.")
            if path in _UNITS:
                raise ValueError(
                    f"The logs have a value under {path!r}, a name that is reserved for the progress of the run. Leave "
                    f"it out, or use another key, such as 'my_{printable(path)}'."
                )
            if isinstance(value, jax.Array):
                _check_on_device(value, path)
                self._from_devices.append((path, len(self.paths)))
            self.paths.append(path)
            keys[key] = None
        return keys

    def checked(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of a row of this form, with all host values converted to Python objects."""
        return [
            value
            if type(value) in _PLAIN
            else _alive(value, path)
            if isinstance(value, jax.Array)
            else _plain(value, path)
            for path, value in zip(self.paths, values, strict=True)
        ]

    def on_device(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns the values that are on devices, keyed by path."""
        return {path: values[place] for path, place in self._from_devices}

    def logs_of(self, values: Iterable[Any]) -> dict[str, Any]:
        """Returns logs that have this form and contain these values."""
        return _filled(self._keys, iter(values))


def _filled(keys: Mapping[str, Any], values: Iterator[Any]) -> dict[str, Any]:
    return {key: next(values) if inner is None else _filled(inner, values) for key, inner in keys.items()}


def _key_and_values(logs: Any) -> tuple[Any, list[Any]]:
    """Returns a key that identifies the form of the logs, and the values in order."""
    if not isinstance(logs, Mapping):
        raise TypeError(
            f"The logs of a history must be a (nested) dict, got {checks.describe(logs)}. Write {{'loss': loss}}."
        )
    key, values = [], []
    for name, value in logs.items():
        kind = type(value)
        if kind in _PLAIN:
            values.append(value)
        elif isinstance(value, Mapping):
            kind, inner = _key_and_values(value)
            values += inner
        else:
            kind = kind, getattr(value, "aval", None)
            values.append(value)
        key += name, kind
    return tuple(key), values


@final
class History:
    """The metrics of a run, as rows `(elapsed, logs)`.

    Refer to a value by its path (`train.loss` for `{"train": {"loss": 0.5}}`) or by an unambiguous suffix (`loss`). In
    names and in the keys of logs, a slash is equivalent to a dot: `train/loss`.

    >>> history = History()
    >>> for step in (100, 200):
    ...     history.commit(Elapsed(step), {"train": {"loss": 10 / step}})
    >>> history.commit(Elapsed(200), {"eval/loss": 0.07, "eval/accuracy": 0.9})
    >>> history
    History(3 rows up to step 200: train.loss, eval.loss, eval.accuracy)
    >>> history.collect("steps", "train.loss")
    ([100, 200], [0.1, 0.05])
    >>> history.collect("accuracy")
    [0.9]
    >>> history.collect("loss")
    Traceback (most recent call last):
    ValueError: 'loss' is ambiguous: it may be any of train.loss, eval.loss. Use one of these names.

    `commit` doesn't wait for the devices. Device values are copied to the host in chunks, and reading rows waits for
    all pending values.

    With a `path`, rows are also appended to that file. Each line is a JSON object, `{"elapsed": {...}, "logs": {...}}`.
    A row with only host values is written before `commit` returns. A row with device values is written once its values
    have arrived on the host, and no later than the next `flush` or `close`. A row that is written out of order contains
    its number (`"row": 7`). Each line is strict JSON: NaN and infinities are written as the strings `"NaN"`,
    `"Infinity"` and `"-Infinity"`, and a logged string that equals one of these is written with a leading `'`.

    Args:
      path: The file to write the rows to. If None, the rows are kept only in memory. The file's directory is created if
        necessary. If the file already has rows, call `resume` before the first commit.
      writes: If False, the file is read but never written, as in all processes of a job except the first.
    """

    def __init__(self, path: epath.PathLike | None = None, *, writes: bool = True):
        self.outputs: list[tuple[Elapsed, Any]] = []
        """The `(elapsed, outputs)` pairs that were passed to `add_outputs`."""
        self._path = None if path is None else _absolute(path)
        self._may_append = path is None or not writes
        self._writes = writes
        self._num_lines = 0  # In the file.
        self._in_file: _Checksum | None = _Checksum()  # None after a failed write.
        self._known_forms: dict[Any, _Form] = {}
        self._clear()

    def _clear(self) -> None:
        # The numbers in the `elapsed` of each row, as tuples, which the garbage collector doesn't have to traverse.
        self._elapsed: list[tuple[Any, ...]] = []
        self._forms: list[_Form] = []  # The form of each row.
        self._columns: dict[str, _Column] = {}
        self._paths_by_end: dict[str, list[str]] = {}
        # The rows for which some values have not arrived yet, oldest first.
        self._waiting: list[int] = []

    @property
    def path(self) -> epath.Path | None:
        """The file that the rows are written to, or None if they are kept only in memory."""
        return self._path

    # Writing ---------------------------------------------------------------------------------------

    def commit(self, elapsed: Elapsed, logs: Mapping[str, Any]) -> None:
        """Appends a row, without waiting for the devices.

        Args:
          elapsed: The progress of the run.
          logs: A (nested) dict of scalars: Python and NumPy numbers, strings, and zero-dimensional arrays, including
            device arrays. A device value must not be donated to a step before its copy has reached the host, so copy
            values that are part of the state.

        Raises:
          TypeError: If a value is not a scalar, or a key is not a string.
          ValueError: If two values have the same path, if a path is the name of a field of `elapsed` (steps, samples,
            time or loops), if a device value was donated, or if the file has rows from an earlier run and `resume` was
            not called.
        """
        _check_elapsed("commit", elapsed)
        form, values = self._read(logs)
        self._check_file()
        self._add(_numbers_of(elapsed), form, values)
        if on_device := form.on_device(values):
            self._send_newest(on_device)
        else:
            self._append_to_file([len(self) - 1])

    def commit_all(self, elapsed: Sequence[Elapsed], logs: Sequence[Mapping[str, Any]]) -> None:
        """Appends several rows; see `commit`.

        If a row can't be appended, the rows before it are kept, and the rows after it are dropped. A note on the error
        gives the `Elapsed` of the row that failed.

        >>> history = History()
        >>> history.commit_all([Elapsed(1), Elapsed(2)], [{"loss": 0.5}, {"loss": 0.4}])
        >>> history.collect("steps", "loss")
        ([1, 2], [0.5, 0.4])

        Args:
          elapsed: The progress of the run at each row.
          logs: The metrics of each row.

        Raises:
          TypeError: If `commit` raises it.
          ValueError: If `elapsed` and `logs` differ in length, or if `commit` raises it.
        """
        if len(elapsed) != len(logs):
            raise ValueError(
                f"History.commit_all needs one elapsed for each item of logs, got {len(elapsed)} and {len(logs)}."
            )
        for now, row in zip(elapsed, logs, strict=True):
            try:
                self.commit(now, row)
            except Exception as error:
                error.add_note(f"when the row of {now!r} was committed")
                raise

    def add_outputs(self, elapsed: Elapsed, outputs: Any) -> None:
        """Adds non-scalar values, such as images.

        The values are kept in memory unchanged, and are not copied to the host.
        """
        _check_elapsed("add_outputs", elapsed)
        self.outputs.append((elapsed.without_previous(), outputs))

    def flush(self) -> None:
        """Waits for all pending values, and writes all rows to the file if there is one.

        A run calls this before it saves a checkpoint, because a checkpoint covers the rows up to its step.
        """
        if self._waiting:
            waiting = [self._on_their_way(number) for number in self._waiting]
            self._take(self._explain_donated(lambda: metrics.fetch(waiting)))

    def close(self) -> None:
        """Calls `flush`. No file stays open between writes, so the history can still be used afterwards."""
        self.flush()

    def checksum(self) -> dict[str, Any] | None:
        """Writes all rows so far, and returns the file's length and SHA-256 checksum, or None if there is no file."""
        self.flush()
        writes = self._path is not None and self._writes
        return self._in_file.to_dict() if writes and self._in_file is not None else None

    def resume(self, steps: int, num_rows: int | None = None, *, checksum: Mapping[str, Any] | None = None) -> None:
        """Drops all rows and outputs after a step, so that a run can continue from that step.

        With a path, the rows are read from the file if it exists, and the file is rewritten if any row was dropped. An
        incomplete last line, left by a killed process, is dropped too. If no rows are kept, the old file is saved as
        `<path>.before`, in case the program was restarted from scratch by mistake. If that file already exists, the
        longer of the two is kept.

        Args:
          steps: The number of completed updates at the point from which the run continues; 0 to start over.
          num_rows: The number of rows that the history had at that point, if known. Any later rows for the same step
            are dropped too, because the run will add them again.
          checksum: The result of `checksum` at that point. If the beginning of the file no longer matches it, the file
            is moved to `<path>.damaged`, the rows that can still be read are kept, and a warning lists what was lost.

        Raises:
          ValueError: If a line of the file is malformed, and no checksum was given.
        """
        if isinstance(steps, bool) or not hasattr(steps, "__index__"):
            raise TypeError(f"History.resume takes a number of steps, got {steps!r}. Write resume(elapsed.steps).")
        steps = operator.index(steps)
        self.flush()
        reader, is_intact, size = None, True, None if checksum is None else checksum["bytes"]
        if self._path is not None and (checksum is not None or self._path.exists()):
            self._in_file = _Checksum.of(self._path, size)
            is_intact = checksum is None or self._in_file.to_dict() == checksum
            reader = _Reader(self._path, self._read, size if is_intact else None, is_lenient=not is_intact)
            rows = reader.rows()
        else:
            rows = [(self._elapsed[n], self._forms[n], self._values_at(n)) for n in range(len(self))]
        num_found = 0
        self._clear()
        for numbers, form, values in rows:
            num_found += 1
            if numbers[0] <= steps and (num_rows is None or num_found <= num_rows):
                self._add(numbers, form, values)
        num_kept = len(self)
        if num_rows is not None and num_kept < num_rows and is_intact:
            logging.warning(
                "%s has %d rows up to step %d, but had %d when the checkpoint of this step was saved. The curves have "
                "a gap.",
                self._path or "The history",
                num_kept,
                steps,
                num_rows,
            )
        if self._path is not None and self._writes:
            if not is_intact:
                self._replace_damaged_file(steps, num_rows, reader)
            elif size is not None:
                num_found += _truncate(self._path, size)
            elif not (reader is not None and reader.is_in_order and num_kept == num_found):
                if num_found and not num_kept:
                    _keep_damaged_file(self._path, "before")
                self._in_file = _write(self._path, map(self._row, range(len(self))))
        self.outputs = [(elapsed, outputs) for elapsed, outputs in self.outputs if elapsed.steps <= steps]
        self._may_append, self._num_lines = True, num_kept
        place = "the history" if self._path is None else self._path
        dropped = num_found - num_kept
        if num_kept or dropped:
            # If none is left, the run that wrote them was probably expected to resume.
            level = logging.INFO if num_kept else logging.WARNING
            logging.log(level, "Resuming %s: %d rows kept, %d dropped after step %d.", place, num_kept, dropped, steps)

    def _replace_damaged_file(self, steps: int, num_rows: int | None, reader: "_Reader | None") -> None:
        """Writes the readable rows of a damaged file to a new file, keeps the old one, and warns about the loss."""
        assert self._path is not None and reader is not None
        lost = 0 if num_rows is None else num_rows - len(self)
        what = "It is missing. " if not self._path.exists() else ""
        if reader.broken_lines:
            what += f"Lines that are not rows: {checks.listed(reader.broken_lines)}. "
        if lost:
            kept = (
                f"The run keeps the other {len(self)}, up to step {self._steps_at(-1)}."
                if len(self)
                else "None is left."
            )
            what += f"{lost} of {num_rows} rows up to step {steps} are lost. {kept}"
        else:
            what += f"All {len(self)} rows up to step {steps} are there, but some were edited or reordered."
        aside = _keep_damaged_file(self._path, "damaged")
        if aside is not None:
            what += f" The original file is kept as {aside}."
        logging.warning("%s has changed since the checkpoint of step %d was saved. %s", self._path, steps, what)
        self._in_file = _write(self._path, map(self._row, range(len(self))))

    # Reading ---------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were committed."""
        self.flush()
        return list(map(self._row, range(len(self))))

    def __len__(self) -> int:
        return len(self._elapsed)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        self.flush()
        return self._row(range(len(self))[index])

    def __repr__(self) -> str:
        if not self._elapsed:
            return "History(no rows)"
        count = "1 row" if len(self) == 1 else f"{len(self)} rows"
        return f"History({count} up to step {self._steps_at(-1)}: {checks.listed(self._columns)})"

    def paths(self) -> list[str]:
        """Returns the full paths of all values so far, in the order in which they first appeared."""
        return list(self._columns)

    def find(self, name: str) -> str:
        """Returns the full path of a value, given its path or an unambiguous suffix of the path.

        An exact match takes precedence.

        Raises:
          ValueError: If the name doesn't match any value, or matches more than one.
        """
        end = _dotted(name)
        if end in self._columns:
            return end
        found = self._paths_by_end.get(end, [])
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"{name!r} is ambiguous: it may be any of {checks.listed(found)}. Use one of these names.")
        nearest = difflib.get_close_matches(end, self._paths_by_end, n=1)
        raise ValueError(
            f"No metric named {name!r} was measured"
            + (f"; did you mean {nearest[0]!r}? " if nearest else ". ")
            + (f"There are: {checks.listed(self._columns)}." if self._columns else "There is nothing yet.")
        )

    def last(self, name: str) -> tuple[Elapsed, Any] | None:
        """Returns the pair `(elapsed, value)` for the latest value with this name, or None if there is no value yet.

        The cost doesn't depend on the length of the history. This method waits for the devices only if the value is
        pending.

        Raises:
          ValueError: If the name matches more than one value.
        """
        if _dotted(name) not in self._paths_by_end:
            return None
        column = self._columns[self.find(name)]
        if isinstance(column.values[-1], jax.Array):
            self.flush()
        return Elapsed(*self._elapsed[column.rows[-1]]), column.values[-1]

    def collect(self, *names: str) -> Any:
        """Returns one list of values per name, from the rows that have a value for every name.

        Args:
          *names: `steps`, `samples`, `time` and `loops` refer to fields of `elapsed`. Other names are looked up as in
            `find`.

        Returns:
          A tuple with one list per name, or just the list if there is only one name. The lists are empty if the history
          is empty.

        Raises:
          ValueError: If a name doesn't match any value, or matches more than one.
        """
        if not names:
            raise ValueError("History.collect takes at least one name, got none. Write collect('steps', 'loss').")
        self.flush()
        wanted = [_dotted(name) for name in names]
        others = [name for name in names if _dotted(name) not in _UNITS] if self._elapsed else []
        columns = {_dotted(name): self._measured(self.find(name)) for name in others}
        numbers: Iterable[int] = range(len(self._elapsed))
        if columns:
            numbers = [
                number for number in min(columns.values(), key=len) if all(number in c for c in columns.values())
            ]
            if not numbers:
                logging.warning(
                    "No row of the history has all of %s, so the lists are empty. Train metrics and evaluations are in "
                    "separate rows: collect them one after the other.",
                    ", ".join(map(printable, names)),
                )
        lists = []
        for end in wanted:
            if end in columns:
                lists.append([columns[end][number] for number in numbers])
            else:
                lists.append([self._elapsed[number][_UNITS.index(end)] for number in numbers])
        return tuple(lists) if len(lists) > 1 else lists[0]

    def to_records(self) -> list[dict[str, Any]]:
        """Returns one flat dict per row, such as `{"steps": 100, ..., "train.loss": 0.5}`, for `pandas.DataFrame`."""
        self.flush()
        records = [Elapsed(*numbers).to_dict() for numbers in self._elapsed]
        for path in self._columns:
            for number, value in self._measured(path).items():
                records[number][path] = value
        return records

    def _measured(self, path: str) -> dict[int, Any]:
        """Returns a path's values by row number, without those whose weight is 0."""
        column, weights = self._columns[path], self._columns.get(path + metrics.WEIGHT)
        values = dict(zip(column.rows, column.values, strict=True))
        for number, weight in zip(weights.rows, weights.values, strict=True) if weights else ():
            if weight == 0:
                values.pop(number, None)
        return values

    # Keeping ---------------------------------------------------------------------------------------

    def save(self, path: epath.PathLike) -> None:
        """Atomically writes all rows to a file, in the format that `load` reads. Outputs are not written."""
        written = _write(_absolute(path), self.rows)
        if _absolute(path) == self._path:
            self._in_file = written

    @classmethod
    def load(cls, path: epath.PathLike) -> "History":
        """Loads a file that was written by `save` or by a history with a path. The loaded history has no path.

        An incomplete last line, left by a process that was killed while writing, is dropped with a warning.

        Raises:
          FileNotFoundError: If the file doesn't exist.
          ValueError: If a line is malformed. The message contains the line number.
        """
        history = cls()
        for row in _Reader(_absolute(path), history._read).rows():
            history._add(*row)
        return history

    def plot(self, *names: str, x: str = "steps") -> "Figure":
        """Returns a figure of learning curves, with one plot per name.

        Each plot has one line for every value whose path ends in the plot's name. For example, `plot("loss")` shows
        `train.loss` and `eval.loss` together, labeled `train` and `eval`. A notebook displays the figure if it is the
        last expression in a cell; `figure.savefig("loss.png")` writes it to a file. This method requires matplotlib,
        but doesn't change its backend or settings.

        Args:
          *names: The values to plot. Without names, all numbers are plotted except for loop statistics (`jaxloop/...`).
          x: The quantity on the x-axis: "steps", "samples", "time" (in seconds) or "loops".

        Raises:
          ValueError: If there is nothing to plot, or if a name doesn't match any numbers.
          ImportError: If matplotlib is not installed.
        """
        if x not in _UNITS:
            raise ValueError(f"History.plot(x=...) takes one of {', '.join(_UNITS)}, got {x!r}.")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "History.plot draws with matplotlib, which is not installed. Run: pip install matplotlib"
            ) from error
        self.flush()
        curves = self._curves(names)
        num_columns = min(len(curves), _AXES_IN_A_LINE)
        num_lines = math.ceil(len(curves) / num_columns)
        figure = Figure(figsize=(max(4.0 * num_columns, 4.8), 3.2 * num_lines), layout="constrained")
        for index, (name, paths) in enumerate(curves.items()):
            axes = figure.add_subplot(num_lines, num_columns, index + 1)
            labels = [path.removesuffix(_dotted(name)).removesuffix(".") for path in paths]
            for path, label in zip(paths, labels, strict=True):
                steps, values = self.collect(x, path)
                few = len(values) <= _FEW_POINTS
                style: dict[str, Any] = (
                    {"marker": "o", "markersize": 4, "linewidth": 1.5} if few else {"linewidth": 1.0}
                )
                axes.plot(steps, values, label=label or name, **style)
            if any(labels):
                axes.legend(frameon=False)
            axes.set(xlabel="time (s)" if x == "time" else x, ylabel=name)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        # IPython displays a Figure automatically only if pyplot was imported.
        figure._repr_png_ = functools.partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
        return figure

    def _curves(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Returns the paths to plot, keyed by the name of the plot that shows them."""
        drawable = {path for path, column in self._columns.items() if not any(map(_is_text, column.values))}
        if not names:
            chosen = [path for path in self._columns if path in drawable and "jaxloop" not in path.split(".")[:2]]
            curves: dict[str, list[str]] = {}
            for path in chosen:
                curves.setdefault(path.rpartition(".")[2], []).append(path)
            if not curves:
                raise ValueError(
                    "There is nothing to plot, because the history has no numbers yet. Commit some, or load it."
                )
            return curves
        curves = {name: self._paths_by_end.get(_dotted(name)) or [self.find(name)] for name in names}
        for name, paths in curves.items():
            if not drawable.issuperset(paths):
                raise ValueError(f"History.plot draws numbers, but {name!r} has strings. Read them with collect.")
        return curves

    # Inside ----------------------------------------------------------------------------------------

    def _check_file(self) -> None:
        if self._may_append or self._path is None:
            return
        if self._path.exists() and self._path.stat().length:
            raise ValueError(
                f"{self._path} has the rows of an earlier run, which must not be mixed with a new one. Call "
                "history.resume(steps) to continue after that step (0 starts over), give another path, or delete it."
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._may_append = True

    def _read(self, logs: Mapping[str, Any]) -> tuple[_Form, list[Any]]:
        """Returns the form and the values of logs. Raises the same errors as `_Form`."""
        key, values = _key_and_values(logs)
        form = self._known_forms.get(key)
        if form is None:
            form = self._known_forms[key] = _Form(logs)
        return form, form.checked(values)

    def _add(self, elapsed: tuple[Any, ...], form: _Form, values: Sequence[Any]) -> None:
        """Appends a row, given the fields of its `Elapsed`."""
        number = len(self)
        self._elapsed.append(elapsed)
        self._forms.append(form)
        for path, value in zip(form.paths, values, strict=True):
            column = self._columns.get(path) or self._new_column(path)
            column.rows.append(number)
            column.values.append(value)

    def _new_column(self, path: str) -> _Column:
        column = self._columns[path] = _Column()
        for end in _ends(path):
            self._paths_by_end.setdefault(end, []).append(path)
        return column

    def _send_newest(self, on_device: dict[str, jax.Array]) -> None:
        """Starts copying the device values of the newest row to the host."""
        self._waiting.append(len(self) - 1)
        for value in on_device.values() if jax.default_backend() != "cpu" else ():  # A CPU shares the host's memory.
            value.copy_to_host_async()
        if len(self._waiting) >= _MAX_PENDING_ROWS:  # The older half has probably been computed by now.
            waiting = [self._on_their_way(number) for number in self._waiting[: _MAX_PENDING_ROWS // 2]]
            self._take(self._explain_donated(lambda: metrics.fetch(waiting)))

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Fills in the oldest waiting rows with values that have arrived, and writes these rows to the file."""
        numbers = self._waiting[: len(rows)]
        for number, values in zip(numbers, rows, strict=True):
            for path, value in values.items():
                self._columns[path].put(number, _plain(value, path))
        del self._waiting[: len(rows)]
        self._append_to_file(numbers)

    def _on_their_way(self, number: int) -> dict[str, Any]:
        """Returns the values of a row that have not been copied from the devices yet."""
        return self._forms[number].on_device(self._values_at(number))

    def _values_at(self, number: int) -> list[Any]:
        columns = [self._columns[path] for path in self._forms[number].paths]
        return [column.values[column.place(number)] for column in columns]

    def _steps_at(self, number: int) -> int:
        return self._elapsed[number][_UNITS.index("steps")]

    def _row(self, number: int) -> Row:
        return Row(Elapsed(*self._elapsed[number]), self._forms[number].logs_of(self._values_at(number)))

    def _append_to_file(self, numbers: Sequence[int]) -> None:
        if self._path is None or not numbers or not self._writes:
            return
        in_file, self._in_file = self._in_file, None  # If the write fails, the contents of the file are unknown.
        with self._open_file() as file:
            if in_file is not None and not files.is_remote(self._path) and file.tell() != in_file.size:
                numbers = [number for number in range(len(self._elapsed)) if number not in self._waiting]
                logging.warning(
                    "%s had %d bytes and now has %d: something else changed or deleted it during the run. It is "
                    "written again, with all %d rows.",
                    self._path,
                    in_file.size,
                    file.tell(),
                    len(numbers),
                )
                file.truncate(0)
                self._num_lines, in_file = 0, _Checksum()
            content = "".join(map(self._next_line, numbers)).encode()
            file.write(content)
        if in_file is not None:
            in_file.add(content)
            self._in_file = in_file

    def _open_file(self) -> IO[bytes]:
        assert self._path is not None
        try:
            return files.open_file(self._path, "ab")
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            error.add_note(
                f"The work directory {self._path.parent} was moved, deleted or replaced during the run. Put it back "
                "and start the run again: it resumes from its newest checkpoint."
            )
            raise

    def _next_line(self, number: int) -> str:
        line = _to_line(self._row(number), None if number == self._num_lines else number)
        self._num_lines += 1
        return line

    def _explain_donated(self, read: Callable[[], Any]) -> Any:
        """Reads device values. If a value was donated, raises an error once and stores NaN in its place."""
        try:
            return read()
        except RuntimeError:
            lost = []
            for number in self._waiting:
                for path, value in self._on_their_way(number).items():
                    if isinstance(value, jax.Array) and value.is_deleted():
                        self._columns[path].put(number, math.nan)
                        lost.append(f"{printable(path)} at step {self._steps_at(number)}")
            if not lost:
                raise
            # The next call reads the rest.
            raise ValueError(
                "A value was committed to the history, and then donated to a step before it arrived: "
                f"{checks.listed(lost)}. The history has NaN for it. Commit a copy of what is part of the state: "
                "jnp.copy(value)."
            ) from None


_numbers_of = operator.attrgetter(*_UNITS, "is_last")


def _absolute(path: epath.PathLike) -> epath.Path:
    path = epath.Path(path).expanduser()
    return path if files.is_remote(path) else path.parent.resolve() / path.name  # The file itself must not be a link.


def _check_elapsed(method: str, elapsed: Any) -> None:
    if not isinstance(elapsed, Elapsed):
        raise TypeError(
            f"History.{method} takes an Elapsed, the progress of the run, got {elapsed!r}. Write Elapsed(steps=100)."
        )


# Names -----------------------------------------------------------------------------------------------


def _dotted(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"A name in a history must be a string such as 'train.loss', got {name!r}.")
    return name.replace("/", ".")


def _ends(path: str) -> list[str]:
    """Returns the names that can refer to a path, such as `a.b.c`, `b.c` and `c`."""
    return [path, *(path[match.end() :] for match in re.finditer(r"\.", path))]


# Values ----------------------------------------------------------------------------------------------


def _check_on_device(value: jax.Array, path: str) -> None:
    if isinstance(value, core.Tracer):
        raise TypeError(
            f"A history takes values, got a tracer of a function that is being compiled, under {printable(path)}. "
            "Return the value from the jitted function, and commit the result."
        )
    if value.ndim or not any(jnp.issubdtype(value.dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
        raise _no_scalar(value, path)


def _alive(value: jax.Array, path: str) -> jax.Array:
    if value.is_deleted():
        raise ValueError(
            f"The value under {printable(path)} was donated to a step, which has reused its memory. "
            "Commit the value that the step returned, or a copy made before it: jnp.copy(value)."
        )
    return value


_PLAIN = {bool, int, float, str}


def _plain(value: Any, path: str) -> bool | int | float | str:
    """Returns a host scalar as a Python object."""
    plain = value
    if isinstance(value, np.generic) or (hasattr(value, "__array__") and np.ndim(value) == 0):
        plain = np.asarray(value).item()
    if type(plain) in _PLAIN:
        return plain
    for kind, python in ((str, str), (int, int), (float, float), (np.floating, float)):
        if isinstance(plain, kind):
            return python(plain)
    raise _no_scalar(value, path)


def _no_scalar(value: Any, path: str) -> TypeError:
    return TypeError(
        f"The logs of a history hold scalars, got {checks.describe(value)} under {printable(path)}. Reduce it to one, "
        "with value.mean() or metric.compute(), say, or keep it as it is: history.add_outputs(elapsed, outputs)."
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# The file --------------------------------------------------------------------------------------------

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# Matches a logged string that consists of one of these words, with any number of leading quotes.
_QUOTED = re.compile(r"'*(NaN|-?Infinity)")
_LONGEST_LINE, _CHUNK = 1 << 24, 1 << 20  # Bytes.
# The errors that a malformed line can cause.
_OF_A_BROKEN_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


def _encoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _encoded(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return f"'{value}" if isinstance(value, str) and _QUOTED.fullmatch(value) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    if isinstance(value, str) and _QUOTED.fullmatch(value):
        return _NOT_FINITE[value] if value in _NOT_FINITE else value[1:]
    return value


def _to_line(row: Row, number: int | None = None) -> str:
    """Returns a row as a line of the file, with the row number if it differs from the line number."""
    line = {"elapsed": {unit: _plain(value, unit) for unit, value in row.elapsed.to_dict().items()}, "logs": row.logs}
    return json.dumps(_encoded(line if number is None else {"row": number, **line}), allow_nan=False) + "\n"


class _Checksum:
    """The length and SHA-256 checksum of a growing file."""

    def __init__(self):
        self.size, self._hash = 0, hashlib.sha256()

    @classmethod
    def of(cls, path: epath.Path, size: int | None = None) -> "_Checksum":
        """Returns the checksum of a file, or of its first `size` bytes. A missing file counts as empty."""
        checksum = cls()
        if path.exists() or os.path.lexists(path):
            with files.open_file(path, "rb") as file:
                while chunk := file.read(_CHUNK if size is None else min(_CHUNK, size - checksum.size)):
                    checksum.add(chunk)
        return checksum

    def add(self, content: bytes) -> None:
        self.size += len(content)
        self._hash.update(content)

    def to_dict(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}


_ReadRow = tuple[tuple[Any, ...], _Form, list[Any]]


class _Reader:
    """Reads the rows of a file, one line at a time.

    Attributes:
      is_in_order: True if all lines read so far are complete rows, in order.
      broken_lines: The numbers of the broken lines that were skipped.
    """

    def __init__(
        self,
        path: epath.Path,
        read: Callable[[Mapping[str, Any]], tuple[_Form, list[Any]]],
        size: int | None = None,
        *,
        is_lenient: bool = False,
    ):
        self._path, self._read, self._size, self._is_lenient = path, read, size, is_lenient
        self.is_in_order = True
        self.broken_lines: list[str] = []

    def rows(self) -> Iterable[_ReadRow]:
        """Yields each row's `Elapsed` fields, form and values. If the file is damaged, the rows are sorted by step."""
        if not self._is_lenient:
            return self._by_number()
        rows = list(self._by_number()) if self._path.exists() else []
        return sorted(rows, key=lambda row: row[0][0])

    def _by_number(self) -> Iterator[_ReadRow]:
        early: dict[int, list[Any]] = {}  # Rows that precede rows with lower numbers.
        next_number = 0
        for number, row in self._numbered():
            if number > next_number:
                early.setdefault(number, []).append(row)
                continue
            yield row
            next_number += number == next_number
            while next_number in early:
                yield from early.pop(next_number)
                next_number += 1
        for number in sorted(early):
            yield from early[number]

    def _numbered(self) -> Iterator[tuple[int, _ReadRow]]:
        left = self._size
        with files.open_file(self._path, "rb") as file:
            for index in itertools.count():
                line = file.readline(_LONGEST_LINE if left is None else min(_LONGEST_LINE, left))
                if not line:
                    return
                left = None if left is None else left - len(line)
                try:
                    number, row = self._parse(line, index)
                except _OF_A_BROKEN_LINE as error:
                    self.is_in_order = False
                    while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                        line = file.readline(_LONGEST_LINE)
                    self._report_broken(index, line, error)
                    continue
                self.is_in_order &= number == index and line.endswith(b"\n")
                yield number, row

    def _report_broken(self, index: int, line: bytes, error: Exception) -> None:
        if self._is_lenient:
            self.broken_lines.append(str(index + 1))
        elif not line.endswith(b"\n"):
            logging.warning(
                "The last line of %s, line %d, is incomplete and was dropped. The process was killed during a write.",
                self._path,
                index + 1,
            )
        else:
            shown = line[:60].decode(errors="replace").strip("\n") + ("..." if len(line) > 60 else "")
            raise ValueError(
                f'{self._path}, line {index + 1}: expected a row, {{"elapsed": {{...}}, "logs": {{...}}}}, got '
                f"{shown!r} ({error}). Correct the line or delete it."
            ) from error

    def _parse(self, line: bytes, place: int) -> tuple[int, _ReadRow]:
        """Parses a line, and returns its row number and row."""
        fields = files.parse_json(line)
        if b"NaN" in line or b"Infinity" in line:
            fields = _decoded(fields)
        elapsed, logs = fields["elapsed"], fields["logs"]
        numbers = _numbers_of(Elapsed(**elapsed))
        if not all([type(value) in (int, float) for value in numbers[:-1]]) or numbers[-1] is not False:
            raise ValueError(f"elapsed has {elapsed}, which are not all numbers")
        return operator.index(fields.get("row", place)), (numbers, *self._read(logs))


def _write(path: epath.Path, rows: Iterable[Row]) -> _Checksum:
    """Writes a file of rows atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, checksum = path.with_name(f"{path.name}.tmp"), _Checksum()
    with files.open_file(unfinished, "wb") as file:
        for row in rows:
            line = _to_line(row).encode()
            file.write(line)
            checksum.add(line)
    unfinished.replace(path)
    return checksum


def _keep_damaged_file(path: epath.Path, suffix: str) -> epath.Path | None:
    """Moves a file to `<path>.<suffix>`, unless a longer file is there. Returns the new path; None if not moved."""
    aside = epath.Path(f"{path}.{suffix}")
    if not path.exists() or (aside.exists() and aside.stat().length > path.stat().length):
        return None
    return path.replace(aside)


def _truncate(path: epath.Path, size: int) -> int:
    """Truncates a file to its first `size` bytes, and returns the number of dropped lines."""
    if path.stat().length == size:
        return 0
    with files.open_file(path, "r+b") as file:
        file.seek(size)
        num_lines = sum(chunk.count(b"\n") for chunk in iter(functools.partial(file.read, _CHUNK), b""))
        file.truncate(size)
    return num_lines


# The picture -----------------------------------------------------------------------------------------


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
