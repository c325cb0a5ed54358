"""Tests of texts for people: names, which can contain any character, are escaped, and a job logs a line once."""

import io
import re

import jax
import numpy as np
import pytest
from absl import logging
from programs import tiny

import jaxloop
from jaxloop import actions, every, examples
from jaxloop.base.text import announce, printable

EVIL = "loss\nWARNING: all is lost\r\x1b[2J\x9b31m\u202e"
SHOWN = r"loss\nWARNING: all is lost\r\x1b[2J\x9b31m\u202e"


def is_clean(text):
    """Returns True if a text has only printable characters, line breaks and the carriage returns of a bar."""
    return all(each.isprintable() or each in "\n\r" for each in text) and not re.search("^WARNING: all", text, re.M)


def test_only_unprintable_characters_are_escaped():
    assert printable(EVIL) == SHOWN and printable("Verlust für ö 损失") == "Verlust für ö 损失"


def test_only_the_first_process_shows_an_announcement_unless_info_lines_are_shown(monkeypatch, caplog):
    before = logging.get_verbosity()
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    try:
        for process in (0, 1):
            monkeypatch.setattr(jax, "process_index", lambda process=process: process)
            for level in (logging.WARNING, logging.INFO):
                logging.set_verbosity(level)
                announce("%s at %d", logging.get_absl_logger().level, process)
    finally:
        logging.set_verbosity(before)
    assert [record.getMessage() for record in caplog.records] == ["30 at 0", "20 at 0", "20 at 1"]


@pytest.mark.parametrize("bar", ["plain", "tqdm"])
def test_names_are_escaped_wherever_a_run_displays_them(bar, logs, tmp_path):
    _, state, batches = examples.tiny_regression()

    class EvilStep(tiny.Regression):
        def run(self, state, batch):
            state, outputs = super().run(state, batch)
            return state, {**outputs, EVIL: outputs["loss"], "text": outputs["loss"], EVIL + "2": outputs["loss"]}

    stream = io.StringIO()
    writer = actions.default_writer(tmp_path / "events")
    writer.write_texts(1, {EVIL: "of two\nlines\x1b[2J"})
    summaries = [actions.SummaryAction(writer, every(steps=2)) for _ in range(2)]
    progress = actions.ProgressAction(bar=bar, stream=stream, min_seconds=0)
    ends = [progress, *summaries, actions.CheckpointAction(tmp_path, every(steps=2), best=f"{EVIL}/loss")]
    evaluates = jaxloop.EvalLoop(tiny.make_step(EvilStep, train=False), end_actions=[summaries[0]])
    outer_loop = jaxloop.OuterLoop(jaxloop.TrainLoop(tiny.make_step(EvilStep), end_actions=ends), [evaluates])
    specs = [jaxloop.EvalSpec(batches[:2], name=EVIL, eval_loop_interval=1)]
    report = str(outer_loop.check(state, batches, 4, 4, specs))
    state, _ = outer_loop(state, batches, 4, 4, specs)
    with pytest.raises(ValueError, match="No metric named") as error:
        outer_loop.history.collect("nothing")
    history = "\n".join(map(str, [outer_loop.history, outer_loop.history.paths(), error.value]))
    shown = {"the bar": stream.getvalue(), "the log": logs.text, "the report": report, "the history": history}
    assert {place: text for place, text in shown.items() if not is_clean(text)} == {}
    assert SHOWN in shown["the bar"] and SHOWN in shown["the log"]


def test_a_layout_escapes_parameter_names():
    text = str(jaxloop.SingleDevicePartitioner().report({EVIL: np.zeros(3, np.float32)}))
    assert SHOWN in text and is_clean(text)
