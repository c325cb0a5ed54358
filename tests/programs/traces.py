"""Traces the calls of jaxloop's functions for one batch, for a save, and from a restart to the first batch.

python tests/programs/traces.py           # Prints them.
python tests/programs/traces.py --write   # Writes them to docs/inside.md, which a test checks.
"""

import argparse
import contextlib
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jaxloop
from jaxloop import every, examples

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "inside.md"
_PACKAGE = str(pathlib.Path(jaxloop.__file__).parent)
_INLINED = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


class Trace:
    """Records calls of the package's functions, and their depth, while `is_on` is True."""

    def __init__(self):
        self.is_on = False
        self._calls: list[tuple[int, str]] = []
        self._depth = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(_PACKAGE):
            return
        if code.co_qualname.endswith(_INLINED):
            return
        if event == "return":
            self._depth -= 1
            return
        if self.is_on:
            module = code.co_filename[len(_PACKAGE) + 1 :].removesuffix(".py").replace("/", ".")
            self._calls.append((self._depth, f"{module}: {code.co_qualname.replace('.<locals>', '')}"))
        self._depth += 1

    def lines(self) -> list[str]:
        """Returns a line per call, indented by its depth. Consecutive repeats share a line with their count."""
        return _folded(self._calls)


def _folded(calls: Sequence[tuple[int, str]]) -> list[str]:
    groups: list[tuple[str, list[str], int]] = []  # The name, the lines of inner calls, and the number of repeats.
    index = 0
    while index < len(calls):
        depth, name = calls[index]
        end = next((place for place in range(index + 1, len(calls)) if calls[place][0] <= depth), len(calls))
        inner = _folded(calls[index + 1 : end])
        if groups and groups[-1][:2] == (name, inner):
            groups[-1] = (name, inner, groups[-1][2] + 1)
        else:
            groups.append((name, inner, 1))
        index = end
    lines = []
    for name, inner, number in groups:
        # Large counts vary between runs, such as the number of files that Orbax writes.
        times = "" if number == 1 else f" (x{number})" if number < 4 else " (x4 or more)"
        lines += [name + times, *(f"  {line}" for line in inner)]
    return lines


class Quiet:
    """A writer that writes nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def one_batch() -> list[str]:
    """Traces one batch of a run that adds a history row and writes a summary after each step."""
    step, state, batches = examples.tiny_regression()
    trace = Trace()

    def data() -> Iterator[Any]:
        for number in range(60):
            trace.is_on = number == 20
            yield batches[number]

    loop = jaxloop.TrainLoop(step, end_actions=[jaxloop.SummaryAction(Quiet(), every(steps=1))])
    outer_loop = jaxloop.OuterLoop(loop, log_interval=every(steps=1))
    with trace.watching():
        outer_loop(state, data(), train_total_steps=40, log_train_total_steps=False)
    return trace.lines()


def save_and_resume(directory: str) -> tuple[list[str], list[str]]:
    """Traces the second save of a run, and then the resumed run from its call to its first batch."""

    class Traced(jaxloop.CheckpointAction):
        trace, calls = Trace(), 0

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            self.trace.is_on = self.calls == 2
            super().__call__(*args, **kwargs)
            self.trace.is_on = False

    def outer_loop(action: jaxloop.CheckpointAction) -> tuple[jaxloop.OuterLoop, Any]:
        step, state, _ = examples.tiny_regression()
        loop = jaxloop.TrainLoop(step, end_actions=[action])
        spec = jaxloop.CheckpointSpec(directory)
        return jaxloop.OuterLoop(loop, checkpoint_spec=spec, log_interval=every(steps=10)), state

    _, _, batches = examples.tiny_regression()
    action, trace = Traced(directory, every(steps=10)), Trace()
    run, state = outer_loop(action)
    with action.trace.watching():
        run(state, jaxloop.from_index(lambda number: batches[number % 100]), 30, log_train_total_steps=False)

    def first_batch(number: int) -> Any:
        trace.is_on = False
        return batches[number % 100]

    run, state = outer_loop(jaxloop.CheckpointAction(directory, every(steps=10)))
    with trace.watching():
        trace.is_on = True
        run(state, jaxloop.from_index(first_batch), 40, log_train_total_steps=False)
    return action.trace.lines(), trace.lines()


def traces() -> dict[str, list[str]]:
    """Returns the lines of all traces, by their names in the page."""
    with tempfile.TemporaryDirectory() as directory:
        save, resume = save_and_resume(directory)
    return {"one-batch": one_batch(), "a-save": save, "a-resume": resume}


def written_into(page: str, lines_by_name: dict[str, list[str]]) -> str:
    """Returns the page with its traces replaced by these."""
    for name, lines in lines_by_name.items():
        block = "\n".join([f"<!-- trace: {name} -->", "", "```text", *lines, "```"])
        page, number = re.subn(
            rf"<!-- trace: {name} -->\n\n```text\n.*?```", lambda _, block=block: block, page, flags=re.DOTALL
        )
        assert number == 1, f"The page has no place for the trace {name}."
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--write",
        metavar="PAGE",
        type=pathlib.Path,
        nargs="?",
        const=PAGE,
        help="write the traces to a page (default: docs/inside.md)",
    )
    page = parser.parse_args().write
    if page is not None:
        page.write_text(written_into(page.read_text(), traces()))
        return
    for name, lines in traces().items():
        print(f"{name}\n  " + "\n  ".join(lines))


if __name__ == "__main__":
    main()
