"""Names of metrics may hold anything, and reach the terminal in many ways."""

import io
import re

import pytest

import jaxloop
from jaxloop import actions, every, examples
from jaxloop.text import printable

EVIL = "loss\nWARNING: all is lost\r\x1b[2J\x9b31m\u202e"
SHOWN = r"loss\nWARNING: all is lost\r\x1b[2J\x9b31m\u202e"


def is_clean(text):
    """Whether a text has nothing but lines, and the return to the start of one that a bar writes."""
    return all(each.isprintable() or each in "\n\r" for each in text) and not re.search("^WARNING: all", text, re.M)


@pytest.mark.parametrize("text", ["loss", "Verlust für ö 损失", "a b", ""])
def test_a_text_that_a_terminal_shows_as_it_is_stays(text):
    assert printable(text) == text


def test_what_is_not_printable_is_escaped():
    assert printable(EVIL) == SHOWN


@pytest.mark.parametrize("bar", ["plain", "tqdm"])
def test_names_are_escaped_wherever_a_run_displays_them(bar, logs, tmp_path):
    plain, state, batches = examples.tiny_regression()

    class EvilStep(type(plain)):
        def run(self, state, batch):
            state, outputs = super().run(state, batch)
            return state, {**outputs, EVIL: outputs["loss"], "text": outputs["loss"], EVIL + "2": outputs["loss"]}

    make = lambda **options: EvilStep(plain.base_prng, plain.model, plain.optimizer, **options)
    stream = io.StringIO()
    writer = actions.LogWriter()
    writer.write_texts(1, {EVIL: "of two\nlines\x1b[2J"})
    summaries = [actions.SummaryAction(writer, every(steps=2)) for _ in range(2)]
    ends = [
        actions.ProgressAction(bar=bar, stream=stream, names=[EVIL, EVIL + "missing"], min_seconds=0),
        *summaries,
        actions.CheckpointAction(tmp_path, every(steps=2), best=f"{EVIL}/loss"),
    ]
    evaluates = jaxloop.EvalLoop(make(), end_actions=[summaries[0]])
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(make(train=True), end_actions=ends), [evaluates])
    specs = [jaxloop.EvalSpec(batches[:2], name=EVIL, eval_loop_interval=1)]
    report = str(outer_loop.check(state, batches, 4, 4, specs))
    state, _ = outer_loop(state, batches, 4, 4, specs)
    with pytest.raises(ValueError, match="Nothing named") as error:
        outer_loop.history.collect("nothing")
    history = "\n".join(map(str, [outer_loop.history, outer_loop.history.paths(), error.value]))
    shown = {"the bar": stream.getvalue(), "the log": logs.text, "the report": report, "the history": history}
    assert {place: text for place, text in shown.items() if not is_clean(text)} == {}
    assert SHOWN in shown["the bar"] and SHOWN in shown["the log"]
