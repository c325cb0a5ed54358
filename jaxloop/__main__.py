"""Commands that describe runs: `python -m jaxloop status|goodput|compare WORKDIR...`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from jaxloop.accounts import goodput
from jaxloop.comparison import compare
from jaxloop.status import status


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxloop", description="Tells of runs, from their work directories."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "status": "how far each run is",
        "goodput": "where the wall time of the runs went, in total",
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
    options = parser.parse_args(arguments)
    try:
        match options.command:
            case "status":
                found = [status(each) for each in options.workdirs]
            case "goodput":
                found = [goodput(*options.workdirs)]
            case _:
                found = [compare(options.workdirs, options.by, options.mode)]
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=1))
    else:
        print("\n".join(map(str, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
