"""`Logs`, a dict of the values that callbacks log, and functions that aggregate logs."""

import collections
from collections.abc import Iterable, Mapping
from typing import Any, Self, final

import jax
from flax import traverse_util

from jaxloop import metrics
from jaxloop.history import find_path
from jaxloop.schedules import Elapsed
from jaxloop.types import Weighted


@final
class Logs(dict[str, Any]):
    """A dict of the values that a step logs, nested by collection and name.

    `Logs` is a pytree, so jitted functions can return it.

    >>> logs = Logs()
    >>> logs.add_metric("accuracy", 0.9).add_loss("loss", 0.3)
    {'metrics': {'accuracy': 0.9}, 'losses': {'loss': 0.3}}
    >>> logs.entry_value("accuracy"), logs.metrics.accuracy, logs.loss
    (0.9, 0.9, 0.3)
    """

    __slots__ = ("__weakref__",)

    def add(self, collection: str, name: str, value: Any) -> Self:
        """Adds a value to a collection and returns self."""
        self.setdefault(collection, Logs())[name] = value
        return self

    def add_metric(self, name: str, value: Any) -> Self:
        """Adds a value to the collection `metrics` and returns self."""
        return self.add("metrics", name, value)

    def add_loss(self, name: str, value: Any) -> Self:
        """Adds a loss and returns self. `train_step` differentiates the sum of all losses.

        Args:
          name: The name of the loss.
          value: A scalar or a `Weighted` mean. In `step` and `train_step`, it may also be an array of per-example
            losses of shape `[batch]`, which are averaged.
        """
        return self.add("losses", name, value)

    @property
    def updates(self) -> "Logs":
        """The collection `updates`, which holds variables that the forward pass changed.

        `train_step` stores these variables in the state. To add a variable to this collection, call
        `logs.add("updates", "batch_stats", batch_stats)`. Histories don't store `updates`.

        An assignment such as `logs.updates, state = train_step(state, batch)` merges the logs that `train_step` returns
        into `logs`, except for their collection `updates`.
        """
        return self.setdefault("updates", Logs())

    @updates.setter
    def updates(self, logs: Mapping[str, Any] | None) -> None:
        self.merge({name: value for name, value in (logs or {}).items() if name != "updates"})

    def merge(self, other: Mapping[str, Any]) -> Self:
        """Merges all entries of `other` into these logs, collection by collection, and returns self."""
        for name, value in other.items():
            if isinstance(value, (dict, Mapping)):  # The first check is cheaper.
                own = self.get(name)
                value = Logs(value) if own is None else Logs({**own, **value} if isinstance(own, Mapping) else value)
            self[name] = value
        return self

    def entry_value(self, name: str) -> Any:
        """Returns the value with the given name, from whichever collection contains it.

        To search only one collection, put the collection's name first: `entry_value("metrics.loss")`.

        Raises:
          ValueError: If there is no value with that name, or more than one.
        """
        values = entries(self)
        return values[find_path(name, values)]

    def __getattr__(self, name: str) -> Any:
        if name in self:
            value = self[name]
            return Logs(value) if isinstance(value, Mapping) and not isinstance(value, Logs) else value
        try:
            return self.entry_value(name)
        except ValueError as error:
            raise AttributeError(error.args[0]) from None


def _flatten_with_keys(logs: Logs) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(logs))
    return [(jax.tree_util.DictKey(name), logs[name]) for name in names], names


# This runs in each call to a compiled function, so its speed matters.
_unflatten = lambda names, values: Logs(zip(names, values, strict=False))
jax.tree_util.register_pytree_with_keys(Logs, _flatten_with_keys, _unflatten)


def entries(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of the values in logs, keyed by path, such as `metrics.loss`."""
    return traverse_util.flatten_dict(logs, sep=".")


def named(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a dict of the values in logs, keyed by short name.

    In the collections `metrics` and `losses`, the short name of a value is the name under which it was logged, such as
    `loss`. In all other collections, the short name also starts with the name of the collection, as in `test/loss`. A
    value that was logged with a weight is returned as a `Weighted`.
    """
    named = {}
    joined = metrics.join_weights(entries(logs))
    # A metric with the same name as a loss comes later, and replaces the loss.
    for path, value in sorted(joined.items(), key=lambda entry: not entry[0].startswith("losses.")):
        collection, _, name = path.partition(".")
        named[(name if name and collection in ("metrics", "losses") else path).replace(".", "/")] = value
    return named


def num_examples(elapsed: Elapsed, before: Elapsed) -> int:
    """Returns the number of examples in the step at which a row was logged.

    If the previous row is more than one step earlier, returns the mean number of examples per step since that row,
    rounded down. The result is at least 1.

    Args:
      elapsed: The progress of the run when the row was logged.
      before: The progress of the run when the previous row was logged.
    """
    return max((elapsed.samples - before.samples) // max(elapsed.steps - before.steps, 1), 1)


def aggregate(rows: Iterable[tuple[Elapsed, Any]]) -> Logs:
    """Returns the mean of each entry over the given rows, which must be on the host and in chronological order.

    Values that were logged with a weight are averaged with that weight. For each such entry, the result also contains
    the sum of its weights. All other numbers are weighted by the number of examples in their step. Strings are left
    out.
    """
    columns, weights = collections.defaultdict[str, list[Weighted]](list), collections.defaultdict[str, float](float)
    before, examples = Elapsed(), 1
    for elapsed, logs in rows:
        if elapsed.steps != before.steps:  # Otherwise, these logs belong to the same step.
            examples, before = num_examples(elapsed, before), elapsed
        for path, value in metrics.join_weights(entries(logs)).items():
            if isinstance(value, Weighted):
                weights[path + metrics.WEIGHT] += float(value.weight)
                columns[path].append(value)
            elif not isinstance(value, str):
                columns[path].append(Weighted.of(value, examples))
    return Logs(traverse_util.unflatten_dict({**metrics.summarize(columns), **weights}, sep="."))


@final
class NewestReady:
    """The latest logged values that have arrived on the host."""

    def __init__(self):
        # The steps that may be in flight, and the latest values of earlier steps.
        self._recent, self._before = collections.deque[Mapping[str, Any]](), dict[str, Any]()

    def push(self, logs: Mapping[str, Any]) -> None:
        """Adds the logs of the next step."""
        self._recent.append(logs)
        if len(self._recent) > 128:
            self._before |= self._recent.popleft()

    def scalars(self) -> dict[str, Any]:
        """Returns a dict of the latest values that can be read without waiting, keyed by name."""
        found = {}
        for logs in (self._before, *self._recent):
            found |= metrics.ready_scalars(named(logs))
        return found
