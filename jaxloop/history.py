"""The history of a run: rows of metrics in memory and, optionally, in a file."""

import functools
import hashlib
import io
import itertools
import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import traverse_util

from jaxloop import metrics
from jaxloop.base import checks, files
from jaxloop.base.text import printable
from jaxloop.schedules import Elapsed
from jaxloop.types import Weighted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HISTORY_FILE = "history.jsonl"
"""The name of the history file in the work directory. Each line contains one row."""

# The history reads its oldest device values when this many rows are pending.
_MAX_PENDING_ROWS = 64
_UNITS: tuple[str, ...] = ("steps", "samples", "time", "loops")


@final
class Row(NamedTuple):
    """One row of a history.

    Attributes:
      elapsed: The progress of the run when the row was committed.
      logs: The metrics, a (nested) dict of Python numbers and strings, with the keys that were passed to
        `History.commit`.
    """

    elapsed: Elapsed
    logs: dict[str, Any]


class _Form:
    """The layout that is shared by all rows whose logs have the same keys, in the same order.

    Each row is stored as a flat tuple: first the steps, samples, time and loops of `Row.elapsed`, and then the values
    in `Row.logs`.

    Args:
      keys: For each value, a tuple of the keys that lead to the value in the nested logs, from the outermost key to the
        innermost.

    Attributes:
      paths: The paths of the values, such as `train.loss`.
      groups: The set of the first components of the paths, such as `train` for `train.loss`.
      places: A dict that maps "steps", "samples", "time" and "loops", as well as the path of each value, to the index
        of that field or value in a stored tuple.

    Raises:
      TypeError: If a key is not a string.
      ValueError: If two values have the same path, or a path is the name of a field of `elapsed`.
    """

    def __init__(self, keys: tuple[tuple[str, ...], ...]):
        self._keys = keys
        self.paths = [".".join(map(_dotted, each)) for each in keys]
        self.groups = {path.partition(".")[0] for path in self.paths}
        names = [*_UNITS, *self.paths]
        self.places = {name: place for place, name in enumerate(names)}
        if len(self.places) < len(names):
            taken = max(names, key=names.count)
            raise ValueError(
                f"The logs have a value under {printable(taken)}, which is also the path of another value or of the "
                f"run's progress. Use another key, such as 'my_{printable(taken)}'."
            )

    def to_row(self, stored: Sequence[Any]) -> Row:
        """Converts a stored tuple to a `Row` with nested logs."""
        values = dict(zip(self._keys, stored[len(_UNITS) :], strict=True))
        return Row(Elapsed(*stored[: len(_UNITS)]), traverse_util.unflatten_dict(values))

    def to_record(self, stored: Sequence[Any]) -> dict[str, Any]:
        """Converts a stored tuple to a flat dict.

        The dict contains the run's progress under "steps", "samples", "time" and "loops", and each value under its
        path. Means whose weight is 0 are left out.
        """
        return {path: value for path in self.places if (value := self.value(stored, path)) is not None}

    def value(self, stored: Sequence[Any], path: str) -> Any:
        """Returns the value at a path in a stored tuple, or None if there is no such value or its weight is 0.

        The path may also be "steps", "samples", "time" or "loops".
        """
        place, weight = self.places.get(path), self.places.get(path + metrics.WEIGHT)
        return None if place is None or (weight is not None and stored[weight] == 0) else stored[place]


_form_of = functools.lru_cache(_Form)


@final
class History:
    """The metrics of a run, as rows `(elapsed, logs)`.

    Refer to a value by its path (`train.loss` for `{"train": {"loss": 0.5}}`) or by an unambiguous suffix (`loss`). In
    names and in the keys of logs, a slash is equivalent to a dot: `train/loss` means `train.loss`.

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

    With a `path`, rows are also appended to a file, in order. Each line is a JSON object, `{"elapsed": {...},
    "logs": {...}}`, which may contain the literals `NaN` and `Infinity`, as Python's `json` writes them. A row with
    only host values is written before `commit` returns, unless an earlier row is still pending. A row with device
    values is written when those values are copied to the host, which happens at the latest when 63 more rows have been
    committed or when `flush` is called.

    Args:
      path: The file to write the rows to. If None, the rows are kept only in memory. The file's directory is created if
        necessary. If the file already has rows, call `resume` before the first commit.
      writes: Whether to write the file. If False, the file is only read, as in all processes of a job except the first.
    """

    def __init__(self, path: epath.PathLike | None = None, *, writes: bool = True):
        self.outputs: list[tuple[Elapsed, Any]] = []
        """The `(elapsed, outputs)` pairs that were passed to `add_outputs`."""
        self.path: epath.Path | None = None if path is None else files.absolute(path)
        """The file that the rows are written to, or None if they are kept only in memory."""
        self._file = None if self.path is None else _File(self.path, writes)
        # The form and the stored values of each row. The garbage collector doesn't have to traverse tuples of numbers.
        self._forms: list[_Form] = []
        self._rows: list[tuple[Any, ...]] = []
        self._newest: dict[_Form, int] = {}  # The number of the newest row of each form.
        self._num_read = 0  # The number of rows before the first one that may have device values.

    # Writing ---------------------------------------------------------------------------------------

    def commit(self, elapsed: Elapsed, logs: Mapping[str, Any]) -> None:
        """Appends a row without waiting for the devices.

        Args:
          elapsed: The current progress of the run.
          logs: A (nested) dict of scalars: Python and NumPy numbers, strings, and zero-dimensional arrays, including
            device arrays. A `Weighted` is stored as two values, such as `loss` and `loss (weight)`. Empty dicts are
            dropped. A device value must not be donated to a step before it has been copied to the host, so pass copies
            of values that are part of the state.

        Raises:
          TypeError: If a value is not a scalar, or a key is not a string.
          ValueError: If two values have the same path, if a path is the name of a field of `elapsed` (steps, samples,
            time or loops), if a device value in an earlier row was donated before it was copied to the host, or if
            the file contains rows from an earlier run and `resume` was not called.
        """
        self.commit_all([(elapsed, logs)])

    def commit_all(self, rows: Sequence[tuple[Elapsed, Mapping[str, Any]]]) -> None:
        """Appends several rows `(elapsed, logs)`; see `commit`. Works fastest if all logs have the same keys.

        >>> history = History()
        >>> history.commit_all([(Elapsed(1), {"loss": 0.5}), (Elapsed(2), {"loss": 0.25})])
        >>> history.collect("loss")
        [0.5, 0.25]

        If a row is invalid, the rows before it are kept, and a note on the error gives the step of the invalid row.
        """
        if self._file is not None:
            self._file.begin()
        try:
            self._add(rows)
        except Exception as error:
            if len(rows) == 1:
                error.add_note(f"in the logs of step {rows[0][0].steps}")
                raise
            for elapsed, logs in rows:  # Their keys differ, or one of them is invalid.
                self.commit(elapsed, logs)
            return
        if len(self._rows) - self._num_read >= _MAX_PENDING_ROWS:
            self._write(len(self._rows) - _MAX_PENDING_ROWS // 2)  # These have probably been computed by now.
        elif _is_plain(self._rows[self._num_read]):
            self._write(self._num_read)

    def add_outputs(self, elapsed: Elapsed, outputs: Any) -> None:
        """Adds non-scalar values, such as images, to the history's `outputs`.

        The values are stored unchanged. They are neither copied to the host nor written to the file.
        """
        self.outputs.append((elapsed.without_previous(), outputs))

    def flush(self) -> None:
        """Waits for all pending values and writes all rows to the file, if there is one.

        A run calls this method before saving a checkpoint, because a checkpoint stores the checksum of the file. The
        file isn't kept open between writes, so a history doesn't have to be closed.
        """
        self._write(len(self._rows))

    def checksum(self) -> dict[str, Any] | None:
        """Writes all pending rows. Returns a dict with the file's length (in bytes) and its SHA-256 checksum.

        Returns None instead if the history has no file, or only reads it.
        """
        self.flush()
        return self._file.checksum() if self._file is not None and self._file.writes else None

    def resume(self, steps: int, num_rows: int | None = None, *, checksum: Mapping[str, Any] | None = None) -> None:
        """Drops all rows and outputs after a given step, so that a run can continue from that step.

        If the history has a path and the file exists, the rows are first read from the file. The file is replaced if
        any row was dropped. An incomplete last line, left by a killed process, is also dropped. If no rows are kept,
        the old file is saved as `<path>.before`, in case the program was restarted from scratch by mistake. If
        `<path>.before` already exists, only the longer of the two files is kept.

        Args:
          steps: The step (the number of completed updates) from which the run continues, or 0 to start over.
          num_rows: The number of rows that the history had when the run was saved at this step, if known. Later rows
            for the same step are also dropped, because the run will add them again.
          checksum: The value that the method `checksum` returned at that time. If the beginning of the file no longer
            has this checksum, the file is moved to `<path>.damaged`. A new file is then written with all rows up to
            this step that are still readable, and a warning reports how many there are.

        Raises:
          ValueError: If a line of the file is malformed and no checksum was given.
        """
        steps = operator.index(steps)  # Not an `Elapsed`.
        self.flush()
        file = self._file
        if file is not None:
            self._forms, self._rows, self._num_read = [], [], 0
            file.clear()
            if file.path.exists():
                self._read(file, checksum)
                file.is_open = True
        keeps = [stored[0] <= steps for stored in self._rows[:num_rows]]
        self._forms = list(itertools.compress(self._forms, keeps))
        self._rows = list(itertools.compress(self._rows, keeps))
        self._num_read = len(self._rows)
        self._newest = {form: number for number, form in enumerate(self._forms)}
        self.outputs = [(elapsed, outputs) for elapsed, outputs in self.outputs if elapsed.steps <= steps]
        if file is None or not file.writes:
            return
        is_intact = checksum is None or file.checksum() == checksum
        if not is_intact:
            text = "%s has changed since the checkpoint of step %d was saved. The run keeps %d of %s rows. %s"
            logging.warning(text, file.path, steps, len(self._rows), num_rows, file.move_aside("damaged"))
        elif file.length() and not self._rows:
            # The run that wrote these rows was probably expected to resume.
            text = "The run starts at step %d, but all rows of %s are later. %s"
            logging.warning(text, steps, file.path, file.move_aside("before"))
        if not is_intact or file.num_lines > len(self._rows) or file.length() != file.size:
            file.replace(map(self._row, range(len(self._rows))))

    # Reading ---------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were committed."""
        return [form.to_row(stored) for form, stored in self._table()]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, index: int) -> Row:
        self.flush()
        return self._row(index)

    def __repr__(self) -> str:
        if not self._rows:
            return "History(no rows)"
        rows = f"{len(self._rows)} row{'s' * (len(self._rows) > 1)}"
        return f"History({rows} up to step {self._rows[-1][0]}: {checks.listed(self.paths())})"

    def paths(self) -> list[str]:
        """Returns the full paths of all values in the history, in order of first appearance."""
        return list(dict.fromkeys(path for form in self._newest for path in form.paths))

    def last(self, name: str) -> tuple[Elapsed, Any] | None:
        """Returns the pair `(elapsed, value)` for the latest value with the given name, or None if there is none.

        This method takes the same time regardless of the length of the history. It waits for the devices only if the
        row that contains the value still has values on a device.

        Raises:
          ValueError: If the name matches more than one value.
        """
        if not matching(name, paths := self.paths()):
            return None
        path = find_path(name, paths)
        number = max(number for form, number in self._newest.items() if path in form.paths)
        if not _is_plain(self._rows[number]):
            self.flush()
        return self._row(number).elapsed, self._rows[number][self._forms[number].places[path]]

    def collect(self, *names: str) -> Any:
        """Returns one list of values per name, from the rows that contain a value for every name.

        Args:
          *names: The names of the values. `steps`, `samples`, `time` and `loops` refer to fields of `elapsed`. All
            other names are full paths or unambiguous suffixes of paths. A name that is a full path refers only to that
            path, even if other paths end with it.

        Returns:
          A tuple with one list per name, or just the list if there is only one name. The lists are empty if no row
          contains a value for every name.

        Raises:
          ValueError: If a name doesn't match any value, or matches more than one, unless the history has no rows.
        """
        resolve = lambda name: name if _dotted(name) in _UNITS or not self._rows else find_path(name, self.paths())
        paths = list(map(resolve, names))
        rows = [[form.value(stored, path) for path in paths] for form, stored in self._table()]
        if not (rows := [values for values in rows if None not in values]) and self._rows:
            logging.warning(
                "No row of the history has all of %s, so the lists are empty. Train metrics and evaluations are in "
                "separate rows: collect them one after the other.",
                ", ".join(map(printable, names)),
            )
        lists = [[values[index] for values in rows] for index in range(len(paths))]
        return lists[0] if len(lists) == 1 else tuple(lists)

    def to_records(self) -> list[dict[str, Any]]:
        """Returns a list with one flat dict per row, such as `{"steps": 100, ..., "train.loss": 0.5}`.

        The list can be passed to `pandas.DataFrame`.
        """
        return [form.to_record(stored) for form, stored in self._table()]

    def records_after(self, steps: int, *, without: Set[str]) -> list[dict[str, Any]]:
        """Returns the rows after a given step as flat dicts; see `to_records`.

        Doesn't flush the history first, so the dicts may contain values that are still on a device. A row is left out
        if all its values belong to the groups in `without`. The group of a value is the first component of its path,
        such as `eval`.
        """
        newest = zip(reversed(self._forms), reversed(self._rows), strict=True)
        rows = list(itertools.takewhile(lambda each: each[1][0] > steps, newest))
        return [form.to_record(row) for form, row in reversed(rows) if not form.groups <= without]

    # Keeping ---------------------------------------------------------------------------------------

    def save(self, path: epath.PathLike) -> None:
        """Atomically writes all rows to a file, in the format that `load` reads. Outputs are not written."""
        _File(path).replace(self.rows)

    @classmethod
    def load(cls, path: epath.PathLike) -> "History":
        """Loads a file that was written by `save` or by a history with a path. The loaded history has no path.

        An incomplete last line, left by a process that was killed while writing, is dropped with a warning.

        Raises:
          FileNotFoundError: If the file doesn't exist.
          ValueError: If a line is malformed. The message contains the line number.
        """
        history = cls()
        history._read(_File(path))
        return history

    def plot(self, *names: str, x: str = "steps", smoothing: float = 0.0) -> "Figure":
        """Returns a figure of learning curves, with one plot per name.

        Each plot has one line for every value whose path ends in the plot's name. For example, `plot("loss")` shows
        `train.loss` and `eval.loss` together, labeled `train` and `eval`. A notebook displays the figure if it is the
        last expression in a cell; `figure.savefig("loss.png")` writes it to a file. This method requires matplotlib,
        but doesn't change its backend or settings.

        For a `jaxloop.Ensemble`, each line shows the mean over the members. A band around the line extends from the
        members' minimum to their maximum.

        Args:
          *names: The names of the values to plot. By default, all numbers except for loop statistics (`jaxloop/...`)
            are plotted.
          x: The quantity on the x-axis: "steps", "samples", "time" (in seconds) or "loops".
          smoothing: The decay of an exponential moving average over the points of each line. With 0, the lines aren't
            smoothed.

        Raises:
          ValueError: If there is nothing to plot, or if a name doesn't match any numbers.
          ImportError: If matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        numbers = [path for path in self.paths() if not isinstance((self.last(path) or ("",))[-1], str)]
        shown = (path for path in numbers if "jaxloop" not in path.split(".")[:2] and not metrics.is_of_members(path))
        of_steps = (path.rpartition(".")[2] for path in shown)
        if not (names := names or tuple(of_steps)):
            raise ValueError("There is nothing to plot, because the history has no numbers yet.")
        curves = {name: matching(name, numbers) or [find_path(name, numbers)] for name in names}
        num_columns = min(len(curves), 4)
        num_lines, unit = math.ceil(len(curves) / num_columns), "time (s)" if x == "time" else x
        figure = Figure(figsize=(max(4.0 * num_columns, 4.8), 3.2 * num_lines), layout="constrained")
        for number, (name, paths) in enumerate(curves.items(), 1):
            axes = figure.add_subplot(num_lines, num_columns, number, xlabel=unit, ylabel=name)
            for path in paths:
                xs, ys = self.collect(x, path)
                label = path.removesuffix(_dotted(name)).removesuffix(".") or name
                axes.plot(xs, list(_smoothed(ys, smoothing)), label=label, marker="." if len(xs) < 50 else None)
                if (low := f"{path}.members.min") in numbers:
                    axes.fill_between(*self.collect(x, low, f"{path}.members.max"), alpha=0.2)
            if paths != [_dotted(name)]:
                axes.legend(frameon=False)
            axes.grid(alpha=0.25)
        # IPython displays a Figure automatically only if pyplot was imported.
        figure._repr_png_ = functools.partial(_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
        return figure

    # Inside ----------------------------------------------------------------------------------------

    def _add(self, rows: Sequence[tuple[Elapsed, Any]]) -> None:
        """Appends rows without writing them to the file.

        Raises an error if a row is invalid (see `commit`), or if the keys of the rows differ.
        """
        columns: dict[tuple[str, ...], list[Any]] = {}
        _collect([logs for _, logs in rows], (), columns)
        form = _form_of(tuple(columns))
        self._forms += [form] * len(rows)
        values = zip(*columns.values(), strict=True) if columns else [()] * len(rows)
        self._rows += [(*_numbers_of(row[0]), *own) for row, own in zip(rows, values, strict=True)]
        self._newest[form] = len(self._rows) - 1

    def _table(self) -> Iterator[tuple[_Form, tuple[Any, ...]]]:
        """Waits for pending values, and then returns an iterator over the pairs `(form, stored tuple)` of all rows."""
        self.flush()
        return zip(self._forms, self._rows, strict=True)

    def _row(self, index: int) -> Row:
        return self._forms[index].to_row(self._rows[index])

    def _write(self, end: int) -> None:
        """Copies the device values of the first `end` rows to the host, and writes these rows to the file.

        Also writes the rows that follow, up to (but not including) the next row that contains a device value. If the
        history has no file, nothing is written.

        Raises:
          ValueError: If any of these device values has been donated. The history then contains NaN in place of each
            donated value.
        """
        lost: list[str] = []
        for number, form in enumerate(self._forms[self._num_read : end], self._num_read):
            self._rows[number] = row = tuple(map(_read, self._rows[number]))
            if _LOST in row:
                lost += [f"{path} at step {row[0]}" for path, place in form.places.items() if row[place] is _LOST]
        self._num_read = end + len([*itertools.takewhile(_is_plain, self._rows[end:])])
        if self._file is not None:
            self._file.append(self._row, self._num_read)
        if lost:
            raise ValueError(
                "A value was committed to the history, and then donated to a step before it arrived: "
                f"{checks.listed(lost)}. The history has NaN for it. Commit a copy of what is part of the state: "
                "jnp.copy(value)."
            )

    def _read(self, file: "_File", checksum: Mapping[str, Any] | None = None) -> None:
        """Adds the rows of a file; see `_File.lines` for the effect of `checksum`.

        If a checksum is given, malformed lines are skipped, because the caller detects the damage: it compares the
        given checksum with the checksum of the lines that were read.

        Raises:
          ValueError: If a line is malformed and no checksum was given.
        """
        for number, line in enumerate(file.lines(checksum), 1):
            try:
                self._add([_parsed(line)])
            except Exception as error:
                if checksum is None:
                    shown = line[:60].decode(errors="replace").strip("\n") + ("..." if len(line) > 60 else "")
                    raise ValueError(
                        f'{file.path}, line {number}: expected a row, {{"elapsed": {{...}}, "logs": {{...}}}}, got '
                        f"{shown!r} ({error}). Correct the line or delete it."
                    ) from error


_numbers_of = operator.attrgetter(*_UNITS)


# Names -----------------------------------------------------------------------------------------------


def _dotted(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"The names and keys of a history must be strings such as 'train.loss', got {name!r}.")
    return name.replace("/", ".")


def matching(name: str, paths: Iterable[str]) -> list[str]:
    """Returns the paths that a name can refer to: those that equal the name or end with a dot followed by the name."""
    end = "." + _dotted(name)
    return [path for path in paths if f".{path}".endswith(end)]


def find_path(name: str, paths: Iterable[str]) -> str:
    """Returns the full path of a value, given the path or an unambiguous suffix of it.

    Raises:
      ValueError: If the name doesn't match any path, or matches more than one.
    """
    end, found = _dotted(name), matching(name, paths)
    if end in found or len(found) == 1:
        return end if end in found else found[0]
    if found:
        raise ValueError(f"{name!r} is ambiguous: it may be any of {checks.listed(found)}. Use one of these names.")
    raise ValueError(f"No metric named {name!r} was measured. There are: {checks.listed(paths) or 'none'}.")


# Values ----------------------------------------------------------------------------------------------

_PLAIN = {bool, int, float, str}
_LOST = float("nan")  # This object stands for a value that was donated before it was read.


_is_mapping = functools.cache(lambda kind: issubclass(kind, Mapping))  # Faster than isinstance.


def _collect(rows: Sequence[Any], outer: tuple[str, ...], columns: dict[tuple[str, ...], list[Any]]) -> None:
    """Adds the (nested) logs of several rows to `columns`.

    Args:
      rows: The logs of each row or, in a recursive call, a dict that is nested in the logs of each row.
      outer: The keys that lead from the logs to this nested dict, from the outermost to the innermost. Empty if `rows`
        contains whole logs.
      columns: A dict that maps the keys of each value, as a tuple, to a list with one value per row.

    Raises:
      TypeError: If the first row is not a dict, or a value is not a scalar.
      Exception: If the rows' keys differ.
    """
    first = rows[0]
    if not _is_mapping(type(first)):
        raise TypeError(
            f"The logs of a history must be a (nested) dict, got {checks.describe(first)}. Write {{'loss': loss}}."
        )
    if len(rows) > 1 and any([list(row) != list(first) for row in rows]):
        raise ValueError("The keys of the rows differ.")
    for key, value in first.items():
        column, keys, kind = [row[key] for row in rows], (*outer, key), type(value)
        if _is_mapping(kind):
            _collect(column, keys, columns)
        elif kind is Weighted:
            _collect([{key: mean.value, f"{key}{metrics.WEIGHT}": mean.weight} for mean in column], outer, columns)
        else:
            columns[keys] = [each if type(each) in _PLAIN else _checked(each, *keys) for each in column]


def _read(value: Any) -> Any:
    """Returns a stored scalar as a Python number or string, or `_LOST` if it is a donated device array."""
    if type(value) in _PLAIN:
        return value
    return _LOST if isinstance(value, jax.Array) and value.is_deleted() else metrics.fetch_scalar(value)


def _is_plain(values: Iterable[Any]) -> bool:
    """Returns True if all values are Python numbers or strings, rather than values on a device."""
    return _PLAIN.issuperset(map(type, values))


def _checked(value: Any, *keys: str) -> Any:
    """Converts a value to the form in which the history stores it: a Python number or string, or a device scalar.

    Raises:
      TypeError: If the value is not a scalar.
    """
    if _is_on_device(type(value), getattr(value, "aval", None)):
        if not metrics.is_on_cpu():
            value.copy_to_host_async()
        return value
    on_host = getattr(value, "ndim", None) == 0 and not isinstance(value, jax.Array)
    plain = np.asarray(value).item() if on_host else value
    for kind, python in ((float, float), (bool, bool), (int, int), (str, str), (np.floating, float)):
        if isinstance(plain, kind):
            return python(plain)
    got = "a tracer of a compiled function" if checks.is_tracer_class(type(value)) else checks.describe(value)
    raise TypeError(
        f"The logs of a history hold scalars, got {got} under {printable('.'.join(map(_dotted, keys)))}. Reduce it "
        "to one, with value.mean() or metric.compute(), say, or keep it as is: history.add_outputs(elapsed, outputs)."
    )


# Called for each value of each step, so its speed matters.
@functools.lru_cache
def _is_on_device(kind: type, aval: Any) -> bool:
    """Returns True if a value with the given class and abstract value (`aval`) is a numeric scalar on a device."""
    numbers = (np.bool_, np.integer, np.floating)
    is_array = issubclass(kind, jax.Array) and not checks.is_tracer_class(kind)
    return is_array and not aval.shape and any(jnp.issubdtype(aval.dtype, each) for each in numbers)


# The file --------------------------------------------------------------------------------------------


def _to_line(row: Row) -> bytes:
    return f"{json.dumps({'elapsed': row.elapsed.to_dict(), 'logs': row.logs})}\n".encode()


def _parsed(line: bytes) -> tuple[Elapsed, Any]:
    """Parses a line of a history's file and returns `(elapsed, logs)`."""
    fields = files.parse_json(line)
    if not all([unit in _UNITS and type(number) in (int, float) for unit, number in fields["elapsed"].items()]):
        raise ValueError(f"elapsed has {fields['elapsed']}, expected numbers under {', '.join(_UNITS)}")
    return Elapsed(**fields["elapsed"]), fields["logs"]


class _File:
    """The file that stores a history.

    Attributes:
      path: The path of the file.
      writes: Whether rows are written to the file.
      is_open: True once it is known that appending rows won't mix two runs: either the file had no rows from an
        earlier run, or the history has read those rows. Always True if no rows are written to the file.
      size: The number of bytes that the history has read from or written to the file.
      num_lines: The number of lines in those bytes.
    """

    def __init__(self, path: epath.PathLike, writes: bool = True):
        self.path, self.writes, self.is_open = files.absolute(path), writes, not writes
        self.clear()

    def clear(self) -> None:
        """Resets the size, the number of lines and the checksum, as if nothing had been read or written."""
        self.size, self.num_lines, self._hash = 0, 0, hashlib.sha256()

    def _add(self, content: bytes) -> None:
        self.size += len(content)
        self.num_lines += content.count(b"\n")
        self._hash.update(content)

    def checksum(self) -> dict[str, Any]:
        """Returns the length and the SHA-256 checksum of what the history has read from or written to the file."""
        return {"bytes": self.size, "sha256": self._hash.hexdigest()}

    def length(self) -> int:
        """Returns the size of the file in bytes, or 0 if the file is missing."""
        return self.path.stat().length if self.path.exists() else 0

    def begin(self) -> None:
        """Prepares the file for its first new row.

        Raises an error if the file has rows from an earlier run that the history hasn't read.
        """
        if self.is_open:
            return
        if self.length():
            raise ValueError(
                f"{self.path} has the rows of an earlier run, which must not be mixed with a new one. Call "
                "history.resume(steps) to continue after that step (0 starts over), give another path, or delete it."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.is_open = True

    def lines(self, checksum: Mapping[str, Any] | None) -> Iterator[bytes]:
        """Yields the file's complete lines, and stops once the lines read so far have the given checksum.

        Yields all complete lines if this checksum is never reached, or if `checksum` is None.
        """
        with files.open_file(self.path, "rb") as file:
            while self.checksum() != checksum and (line := file.readline()):
                if not line.endswith(b"\n"):
                    logging.warning("The last line of %s is incomplete, and was dropped.", self.path)
                    return
                self._add(line)
                yield line

    def append(self, row: Callable[[int], Row], end: int) -> None:
        """Appends the history's first `end` rows, except for those already in the file.

        If a local file no longer has the expected size, the whole file is written again.

        Args:
          row: A function that returns the history's row at a given index.
          end: The number of rows that the file should have afterwards.
        """
        if not self.writes or end <= self.num_lines:
            return
        content = b"".join([_to_line(row(number)) for number in range(self.num_lines, end)])
        with files.open_file(self.path, "ab") as file:
            if files.is_remote(self.path) or file.tell() == self.size:
                file.write(content)
                self._add(content)
                return
        text = "%s was changed or deleted during the run, or a write failed. It is written again, with all %d rows."
        logging.warning(text, self.path, end)
        self.replace(map(row, range(end)))

    def replace(self, rows: Iterable[Row]) -> None:
        """Atomically replaces the file with one that contains the given rows."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = b"".join(map(_to_line, rows))
        self.clear()
        files.write_atomically(self.path, content)
        self._add(content)

    def move_aside(self, suffix: str) -> str:
        """Moves the file to `<path>.<suffix>`, unless a longer file already exists there.

        Returns a sentence that describes what was done.
        """
        aside = epath.Path(f"{self.path}.{suffix}")
        if not self.path.exists():
            return "It was deleted."
        if aside.exists() and aside.stat().length > self.length():
            return f"It is not kept, because there is a longer {aside}."
        self.path.replace(aside)
        return f"The original file is kept as {aside}."


# The picture -----------------------------------------------------------------------------------------


def _smoothed(values: Sequence[float], decay: float) -> Iterator[float]:
    """Yields, for each value, the bias-corrected exponential moving average of all values up to that one."""
    total = weight = 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        yield total / weight


def _png(figure: "Figure") -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
