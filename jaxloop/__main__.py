"""The command-line interface: `python -m jaxloop COMMAND WORKDIR...`. The `--help` option lists the commands."""

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence

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
            command.add_argument(
                "--mode", choices=("auto", "min", "max"), default="auto", help="which values are better"
            )
        command.add_argument("--json", action="store_true", help="print JSON")
    command = commands.add_parser("tell", help="give commands to a run", description="Gives commands to a run.")
    command.add_argument("workdirs", nargs=1, metavar="workdir", help="the work directory of an OuterLoop that trains")
    known = "save, stop, log_every=10, summary.interval=100, ..."
    command.add_argument("commands", nargs="+", metavar="command", help=known)
    command.add_argument("--wait", type=float, default=30.0, help="seconds to wait for each answer (30)")
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "status":
                found = [status(each) for each in options.workdirs]
            case "goodput":
                found = [goodput(each) for each in options.workdirs]
            case "compare":
                found = [compare(options.workdirs, options.by, options.mode)]
            case _:
                return _tell(options.workdirs[0], options.commands, options.wait)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    else:
        print("\n".join(map(str, found)))
    return 0


def _tell(workdir: str, given: Sequence[str], wait_secs: float) -> int:
    code = 0
    for command in given:
        answer = tell(workdir, command, wait_secs)
        if answer is None:
            text = f"{command}: no answer within {wait_secs:g} s. The run executes the command after its next step."
            print(text, file=sys.stderr)
        else:
            print(answer, file=sys.stdout if answer.error is None else sys.stderr)
        code |= answer is None or answer.error is not None
    return code


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Exit silently when `head` or a pager closes the pipe.
    sys.exit(main())
