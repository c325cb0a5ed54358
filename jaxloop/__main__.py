"""The command-line interface: `python -m jaxloop COMMAND WORKDIR...`. The `--help` option lists the commands."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxloop.runs.accounts import goodput
from jaxloop.runs.commands import tell
from jaxloop.runs.comparison import compare
from jaxloop.runs.status import status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxloop", description="Describes runs from their work directories, and commands them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "status": "how far each run is",
        "goodput": "where the wall time of each run went",
        "compare": "the runs in the order of the best value of a metric",
    }
    for name, text in texts.items():
        command = commands.add_parser(name, help=text, description=f"Prints {text}.")
        command.add_argument("workdirs", nargs="+", metavar="workdir", help="the work directory of an OuterLoop")
        if name == "compare":
            command.add_argument("--by", required=True, help="the metric's path in the history, such as test.accuracy")
            command.add_argument("--mode", choices=("auto", "min", "max"), default="auto", help="which is better")
        command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("tell", help="give commands to a run", description="Gives commands to a run.")
    command.add_argument("workdirs", nargs=1, metavar="workdir", help="the work directory of an OuterLoop that trains")
    command.add_argument("commands", nargs="+", metavar="command", help="save, stop, log_every=10, ...")
    command.add_argument("--wait", type=float, default=30.0, help="seconds to wait for each answer (30)")
    options = parser.parse_args(arguments)
    if options.command == "tell":
        return _tell(options.workdirs[0], options.commands, options.wait)
    describe = goodput if options.command == "goodput" else status
    found = {workdir: each for workdir in options.workdirs for each in _tried(describe, workdir)}
    code = int(len(found) < len({*options.workdirs}))
    if options.command == "compare" and found:
        found = dict(enumerate(_tried(compare, [*found], options.by, options.mode)))
        code |= not found
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found.values()], indent=1))
        return code
    for workdir, each in found.items():
        print(f"{workdir}:\n{each}" if options.command == "goodput" and len(found) > 1 else each)
    return code


def _tried(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls a function and returns a list whose only element is the function's result.

    If the function raises an `OSError` or a `ValueError`, prints the error and returns an empty list.
    """
    try:
        return [function(*arguments)]
    except (OSError, ValueError) as error:
        print(f"python -m jaxloop: {error}", file=sys.stderr)
        return []


def _tell(workdir: str, given: Sequence[str], wait_secs: float) -> int:
    code = 0
    for command in given:
        answers = _tried(tell, workdir, command, wait_secs)
        if answers == [None]:
            text = f"{command}: no answer within {wait_secs:g} s. The run executes the command after its next step."
            print(text, file=sys.stderr)
        for answer in filter(None, answers):
            print(answer, file=sys.stdout if answer.error is None else sys.stderr)
        code |= not any(answer and answer.error is None for answer in answers)
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Exit silently when `head` or a pager closes the pipe.
    sys.exit(main())
