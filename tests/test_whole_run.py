"""Tests that a resumed run gives the same results as an uninterrupted one."""

import functools
import signal

import jax
import jax.numpy as jnp
import pytest
from programs import whole_run
from programs.acts import Do, Record
from programs.tiny import experiment
from programs.whole_run import once

import jaxloop
from jaxloop import every
from jaxloop.schedules import never

PROGRAM = functools.cache(whole_run.make_program)  # Initialized and compiled once.


def run(directory, **options):
    return whole_run.run(directory, program=PROGRAM(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"source": "list"},
        {"source": "generator"},
        {"source": "grain", "prefetch": 2},
        {"source": "tf.data"},
        {"source": "list", "total": 15, "epochs": 2, "loop_steps": None},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_run_can_be_resumed_from_every_step(options, tmp_path):
    whole = run(tmp_path / "whole", **options)  # Keeps a checkpoint of every step.
    total = options.get("total", 10)
    assert len(whole["ids"]) == total and len(whole["history"]) > 4 and len(whole["written"]) > 4
    for step in range(0, total + 1, 5 if options["source"] == "tf.data" else 1):  # Opening tf.data takes long.
        resumed = run(whole_run.copy_until(step, tmp_path / "whole", tmp_path / str(step)), **options, saves=False)
        whole_run.assert_resumed_exactly(resumed, whole, step)


def record(interval, category):
    """Records the steps at which it is called, after the evaluations or with the checkpoints."""
    return Record(interval, uses_outputs=False, runs_last=True, time_category=category)


def press_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("place", ["eval", "writer"])
def test_a_resumed_run_that_is_stopped_again_calls_everything_once(place, tmp_path):
    whole, parts = run(tmp_path / "whole"), []
    after, export = record(every(4), "actions"), record(every(4), "checkpoints")
    # An evaluation is due after step 8. The first signal keeps it from starting, and the second comes while the resumed
    # run makes up for it.
    for event, number in (("action", 8), (place, 101 if place == "eval" else 8), (None, None)):
        parts.append(run(tmp_path / "stopped", watch=once(event, number, press_ctrl_c), more_actions=[after, export]))
    first, second, last = (part["step"] for part in parts)
    # An interrupted evaluation begins again. After a complete one, the run makes a step, whose checkpoint contains it.
    assert first == 8 and last == 10 and (second == 8 if place == "eval" else second > 8)
    assert sorted(str(row) for part in parts for row in part["written"]) == sorted(map(str, whole["written"]))
    assert parts[-1]["state"] == whole["state"] and parts[-1]["history"] == whole["history"]
    assert after.seen == export.seen == [4, 8]


def test_what_an_evaluation_saves_is_saved_once_despite_signals(tmp_path):
    program, steps, exported = PROGRAM(), [], []
    for event, number in (("action", 8), ("evaluated", 8), (None, None)):
        watch, export = once(event, number, press_ctrl_c), record(1, "checkpoints")
        program.train_step.ids, program.train_step.watch, program.eval_step.watch = [], watch, watch
        evaluated = Do(lambda step_num, watch=watch, **_: watch("evaluated", step_num))
        steps_of = {"step": program.train_step, "eval_step": program.eval_step, "evals": [[evaluated, export]]}
        outer_loop = experiment(whole_run.ReportSteps(watch), directory=tmp_path, saves=every(4), **steps_of)
        batches = [whole_run.batch_of(number) for number in range(12)]
        state = jax.tree.map(jnp.copy, program.state)
        state, _ = outer_loop(state, batches, 10, 4, [jaxloop.EvalSpec(batches[:1], eval_loop_interval=1)])
        steps.append(int(state.step))
        exported += export.seen
    assert steps == [8, 9, 10] and exported == [4, 8, 10]


def test_a_signal_before_anything_was_called_costs_no_step(tmp_path):
    assert run(tmp_path, total=6)["step"] == 6
    interrupt = Do(print, never(), begin_run=lambda step_num, can_resume: press_ctrl_c())
    stopped = run(tmp_path, more_actions=[interrupt])
    assert stopped["step"] == 6 and stopped["ids"] == [] and run(tmp_path)["step"] == 10
