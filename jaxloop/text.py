"""Text for people: suggestions in error messages, and names that are safe to display in a terminal or log."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def suggests(**arguments: str) -> Callable[[_Function], _Function]:
    """Returns a decorator for a function that people call with wrong argument names.

    >>> @suggests(epochs="train_epochs")
    ... def run(train_epochs=1): ...
    >>> run(epochs=2)
    Traceback (most recent call last):
    ...
    TypeError: run has no argument 'epochs'. Did you mean train_epochs?

    Args:
      **arguments: The right name for each wrong name.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name in arguments.keys() & kwargs.keys():
                raise TypeError(f"{function.__name__} has no argument {name!r}. Did you mean {arguments[name]}?")
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


def printable(text: object) -> str:
    r"""Returns text as a single line, with all unprintable characters escaped.

    Metric names and text read from files may contain newlines, carriage returns or escape sequences. Use this function
    wherever such text is displayed. When writing to files, keep the original text.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
