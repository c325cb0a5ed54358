"""A report on a run as a single HTML file: learning curves, time breakdown, starts and environment."""

import datetime
import html
import io
from collections.abc import Iterable, Sequence

from etils import epath

from jaxloop import accounts, files, run_log
from jaxloop.history import HISTORY_FILE, History
from jaxloop.preflight.report import Report
from jaxloop.status import status
from jaxloop.text import printable
from jaxloop.timing import duration

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #222; }
h1, h2 { line-height: 1.2; overflow-wrap: anywhere; } h2 { margin-top: 2.5rem; }
table { border-collapse: collapse; } div { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td.bar { width: 40%; min-width: 6rem; } td.bar span { display: block; height: .8rem; background: #4477aa; }
svg { max-width: 100%; height: auto; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; } svg { background: #fff; } }
"""


def report(workdir: epath.PathLike) -> str:
    """Returns an HTML page that describes the run in a work directory.

    The page doesn't load other files or run scripts.

    Raises:
      FileNotFoundError: If the directory has no run log.
    """
    found, spent, attempts = status(workdir), accounts.goodput(workdir), run_log.read(workdir)
    of = "" if found.total_steps is None else f" of {found.total_steps:,}"
    summary = [
        ("state", found.state),
        ("step", "none" if found.step is None else f"{found.step:,}{of}"),
        ("newest checkpoint", "none" if found.checkpoint is None else f"step {found.checkpoint:,}"),
        ("wall time", f"{duration(spent.total)}, {spent.productive / max(spent.total, 1e-9):.0%} in new steps"),
        *(
            (name, f"{value:.6g} at step {step:,}" if isinstance(value, float) else f"{value} at step {step:,}")
            for name, (step, value) in found.metrics.items()
        ),
    ]
    sections = [
        f"<h1>{_text(found.workdir)}</h1>",
        _table([("th", name, "td", value) for name, value in summary]),
        "<h2>Curves</h2>",
        _curves(files.absolute(workdir) / HISTORY_FILE),
        *_check(workdir),
        "<h2>Where the time went</h2>",
        _bars(spent),
        f"<p>{_text(spent.advice)}</p>" if spent.advice else "",
        "<h2>Starts</h2>",
        _starts(attempts),
        "<h2>Notes and environment</h2>",
        _table([("th", name, "td", str(value)) for name, value in _described(attempts[-1])]),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>{_text(found.workdir)}</title>"
    body = "\n".join(section for section in sections if section)
    return f"<!doctype html>\n<html lang=en>{head}{title}<style>{_STYLE}</style>\n<body>\n{body}\n</body></html>\n"


def _check(workdir: epath.PathLike) -> Iterable[str]:
    """Yields the sections with the plan of the run and the problems found by the most recent check."""
    if (found := Report.load(workdir)) is None:
        return
    yield "<h2>Plan</h2>"
    yield _table([("th", name, "td", text) for name, text in found.plan.items()])
    yield "<h2>Findings of the check</h2>"
    rows = [
        ("th", "error" if each.is_error else "warning", "td", f"{each.where}: {each.text}") for each in found.problems
    ]
    yield _table(rows) if rows else "<p>No problem was found.</p>"


def _curves(path: epath.Path) -> str:
    try:
        figure = History.load(path).plot()
    except (FileNotFoundError, ValueError, ImportError) as error:
        return f"<p>{_text(error)}</p>"
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue().decode()
    return f"<div>{svg[svg.index('<svg') :]}</div>"


def _bars(spent: accounts.Goodput) -> str:
    total = max(spent.total, 1e-9)
    rows = [
        f"<tr><td>{_text(name)}</td><td class=number>{share:.1%}</td><td class=number>{duration(secs)}</td>"
        f'<td class=bar><span style="width:{min(max(share, 0), 1):.2%}"></span></td></tr>'
        for name, secs in spent.parts.items()
        if (share := secs / total) >= 0.0005
    ]
    return f"<div><table>{''.join(rows)}</table></div>"


def _starts(attempts: Sequence[run_log.Attempt]) -> str:
    rows = [("th", "started", "th", "from step", "th", "to step", "th", "end")]
    for attempt in attempts:
        started = datetime.datetime.fromtimestamp(attempt.started).astimezone().isoformat(" ", "seconds")
        first = f"{attempt.points[0][1]:,}" if attempt.points else ""
        end = attempt.reason or ("killed" if attempt.killed or attempt is not attempts[-1] else "has not ended")
        rows.append(("td", started, "td", first, "td", f"{attempt.last[1]:,}" if attempt.points else "", "td", end))
    return _table(rows)


def _described(attempt: run_log.Attempt) -> Iterable[tuple[str, object]]:
    for key in ("notes", "environment"):
        values = attempt.described.get(key)
        yield from values.items() if isinstance(values, dict) else ()
    yield "host", attempt.described.get("host", "")


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Returns an HTML table. Each row is a sequence of alternating tags and texts."""
    lines = [
        "".join(f"<{tag}>{_text(text)}</{tag}>" for tag, text in zip(row[::2], row[1::2], strict=True)) for row in rows
    ]
    return f"<div><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def _text(value: object) -> str:
    return html.escape(printable(value))
