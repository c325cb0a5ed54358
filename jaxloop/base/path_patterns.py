"""Patterns that select leaves of a pytree by their paths, such as `encoder/**`."""

import re
from collections.abc import Iterable, Mapping

from jaxloop.base import checks

_WILDCARD = re.compile(r"\*\*|\*")


def matches(pattern: str, path: str) -> bool:
    """Returns True if a pattern matches a whole path.

    The names in a path are separated by slashes. `*` matches one name, and `**` matches one or more names. A pattern
    may omit the trailing `/value` in the paths of an NNX model.

    >>> matches("encoder/**", "encoder/Dense_0/kernel"), matches("*/kernel", "encoder/Dense_0/kernel")
    (True, False)
    >>> matches("head/kernel", "head/kernel/value")
    True
    """
    expression = _expression(pattern)
    return any(expression.fullmatch(name) for name in (path, path.removesuffix("/value")))


def renamed(paths: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Returns a dict that maps each path matched by a pattern to its new path.

    >>> renamed(["backbone/Dense_0/kernel", "head/kernel"], {"backbone/**": "encoder/**"})
    {'backbone/Dense_0/kernel': 'encoder/Dense_0/kernel'}

    Args:
      paths: The paths to rename.
      patterns: A dict that maps patterns to new paths. A new path contains the same wildcards as its pattern, in the
        same order. Each wildcard in the new path is replaced with the names that the corresponding wildcard in the
        pattern matched. If several patterns match a path, the first one is used.

    Raises:
      ValueError: If a pattern matches no path, or if a pattern and its new path have different wildcards.
    """
    paths, new_paths = list(paths), {}
    for pattern, target in patterns.items():
        if _WILDCARD.findall(pattern) != _WILDCARD.findall(target):
            raise ValueError(
                f"A pattern and its new path must have the same wildcards in the same order, got {pattern!r} and "
                f"{target!r}. Write {{'encoder/**': 'backbone/**'}}, for example."
            )
        found = [(path, match) for path in paths if (match := _expression(pattern).fullmatch(path))]
        if not found:
            raise ValueError(
                f"The pattern {pattern!r} matches no path. The paths are:\n" + "\n".join(checks.first_lines(paths))
            )
        for path, match in found:
            pairs = zip(_WILDCARD.split(target), [*match.groups(), ""], strict=True)
            new_paths.setdefault(path, "".join(text + names for text, names in pairs))
    return new_paths


def _expression(pattern: str) -> re.Pattern[str]:
    parts = _WILDCARD.split(pattern)
    wildcards = ["(.+)" if each == "**" else "([^/]+)" for each in _WILDCARD.findall(pattern)]
    text = "".join(re.escape(part) + wildcard for part, wildcard in zip(parts, [*wildcards, ""], strict=True))
    return re.compile(text)
