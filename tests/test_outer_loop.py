import errno
import itertools
import os
import re
import shutil
import threading
import time

import jax
import numpy as np
import pytest
from absl import logging
from programs.acts import Do, Fail, Record, Stop, in_a_thread, raising, then_fail
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP, experiment

from jaxloop import STOP_LOOP, actions, checkpoint, examples
from jaxloop.checkpoint import seal
from jaxloop.distributed import lock
from jaxloop.eval_loop import EvalLoop
from jaxloop.outer_loop import CheckpointSpec, EvalContext, EvalSpec, OuterLoop
from jaxloop.schedules import every, last
from jaxloop.train_loop import TrainLoop


def train(start, total, loop_steps):
    """Trains from a step, and records where the loops end."""
    note, state = Record(), STATE.replace(step=STATE.step + start)
    state, outputs = experiment(note)(state, itertools.cycle(BATCHES), total, loop_steps)
    return state, outputs, note.seen


# Length of a run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "total", "loop_steps", "ends"),
    [
        (0, 25, 10, [10, 20, 25]),
        (55, 100, 10, [60, 70, 80, 90, 100]),
        (0, 5, 10, [5]),
    ],
)
def test_train_total_steps_counts_all_updates(start, total, loop_steps, ends):
    state, outputs, noted = train(start, total, loop_steps)
    assert (int(state.step), noted) == (total, ends)
    assert len(outputs["loss"]) == ends[-1] - ([start, *ends])[-2]


@pytest.mark.parametrize("start", [100, 101])
def test_a_finished_run_makes_no_update(start, warnings_logged):
    state, outputs, noted = train(start, 100, 10)
    assert (outputs, noted) == (None, [])
    assert warnings_logged() == [f"Nothing is left to train: step {start} has reached train_total_steps=100."]
    jax.tree.map(np.testing.assert_array_equal, state, STATE.replace(step=STATE.step + start))


@pytest.mark.parametrize("loop_steps", [7, None])
def test_a_dataset_that_ends_early_causes_a_warning(loop_steps, warnings_logged):
    state, outputs = OuterLoop(TrainLoop(STEP))(STATE, BATCHES[:50], train_total_steps=100, train_loop_steps=loop_steps)
    assert int(state.step) == 50 and outputs["loss"]
    warnings = [text for text in warnings_logged() if "train_total_steps" in text]
    assert "They end at step 50, after 50 batches" in warnings[0]
    assert "ended at step 50 of train_total_steps=100" in warnings[1]


def test_without_a_total_the_dataset_ends_the_run(warnings_logged):
    state, outputs = OuterLoop(TrainLoop(STEP), log_interval=last())(STATE, BATCHES[:50])
    assert (int(state.step), len(outputs["loss"])) == (50, 50)
    assert warnings_logged() == []


def test_a_log_interval_that_is_set_later_is_checked():
    outer_loop = OuterLoop(TrainLoop(STEP))
    outer_loop.log_interval = 2.5
    with pytest.raises(TypeError, match="log_interval must be a positive int"):
        outer_loop(STATE, BATCHES, 20, 10)


def test_intervals_continue_after_a_resume():
    interval = 3

    def run(*totals):
        trained, evaluated = Record(interval), Record(interval)
        state = STATE
        for total in totals:
            outer_loop = experiment(trained, evals=[[evaluated]])
            state, _ = outer_loop(state, BATCHES, total, 10, eval_specs=[EvalSpec(BATCHES[:2])])
        assert trained.seen == evaluated.seen
        return trained.seen

    assert run(60) == run(40, 60) == run(30, 60) == list(range(10 * interval, 61, 10 * interval))


# Evaluation ------------------------------------------------------------------------------------------


def test_evaluations_follow_their_specs():
    notes, contexts = [Record(), Record(), Record()], []
    is_late = lambda context: contexts.append(context) or context.loop_count > 2
    specs = [
        EvalSpec(BATCHES[:3]),
        EvalSpec(BATCHES, num_steps=2, eval_loop_interval=2),
        EvalSpec(BATCHES[:1], eval_loop_interval=2, should_eval_fn=is_late),
    ]
    outer_loop = experiment(evals=[[note] for note in notes])
    _, outputs = outer_loop(STATE, BATCHES, train_total_steps=40, train_loop_steps=10, eval_specs=specs)
    assert [note.seen for note in notes] == [[10, 20, 30, 40], [20, 40], [40]]
    assert contexts[0] == EvalContext(is_continuous_eval=False, step_num=20, loop_count=2)
    assert len(outputs["loss"]) == 10  # From the train loop.


def test_one_evaluation_runs_without_a_train_loop():
    same_state, outputs = OuterLoop(eval_loops=[EvalLoop(STEP)])(STATE, eval_specs=[EvalSpec(BATCHES[:5])])
    assert same_state is STATE and len(outputs["loss"]) == 5


def test_the_next_evaluation_continues_an_eval_iterator():
    spec = EvalSpec(None, dataset_iterator=iter(BATCHES), num_steps=40)
    outer_loop = OuterLoop(eval_loops=[EvalLoop(STEP, stat_names=[])])
    first, second = (outer_loop(STATE, eval_specs=[spec])[1]["loss"] for _ in range(2))
    whole = EvalLoop(STEP)(STATE, BATCHES, 80)[1]["loss"]
    assert [*first, *second] == whole


def test_an_eval_dataset_may_be_a_function_that_returns_an_iterator():
    as_list, by_function = experiment(evals=[[]]), experiment(evals=[[]])
    spec = EvalSpec(lambda: (batch for batch in BATCHES[:3]))
    report = by_function.check(STATE, BATCHES, 20, 10, eval_specs=[spec])
    assert report.ok, report
    as_list(STATE, BATCHES, 20, 10, eval_specs=[EvalSpec(BATCHES[:3])])
    by_function(STATE, BATCHES, 20, 10, eval_specs=[spec])
    assert by_function.history.collect("eval.loss", "steps")[1] == [10, 20]
    assert by_function.history.collect("eval.loss") == as_list.history.collect("eval.loss")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: lambda: iter([]), "yielded no batches.*function that returns a new iterator each time"),
        (lambda: iter([]), "If it is an exhausted iterator, give an iterable"),
    ],
)
def test_an_empty_eval_dataset_raises(dataset, message, tmp_path):
    outer_loop = experiment(evals=[[]], directory=tmp_path, saves=9)
    with pytest.raises(ValueError, match=message):
        outer_loop(STATE, BATCHES, 20, 10, eval_specs=[EvalSpec(dataset())])
    assert checkpoint.all_steps(tmp_path) == [10]  # Nothing was lost.
    assert int(outer_loop.rescued_state.step) == 10


def test_an_evaluation_that_never_runs_causes_a_warning(tmp_path, warnings_logged):
    spec = EvalSpec(BATCHES[:2], should_eval_fn=lambda context: False)
    assert OuterLoop(eval_loops=[EvalLoop(EVAL_STEP)])(STATE, eval_specs=[spec]) == (STATE, None)
    (tmp_path / "STOPPED").touch()
    OuterLoop(None, [EvalLoop(EVAL_STEP)], CheckpointSpec(tmp_path))(STATE, eval_specs=[EvalSpec(BATCHES[:2])])
    assert [text.split(":")[0] for text in warnings_logged()] == ["Nothing was evaluated"] * 2


def test_an_eval_dataset_shorter_than_num_steps_causes_a_warning(warnings_logged):
    OuterLoop(eval_loops=[EvalLoop(EVAL_STEP)])(STATE, eval_specs=[EvalSpec(BATCHES[:5], num_steps=7)])
    assert "ended after 5 of num_steps=7 batches" in warnings_logged()[0]


# Stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("train_actions", "eval_actions"), [([Stop(2)], []), ([], [Stop(2)])], ids=["train", "eval"])
def test_an_action_of_a_loop_stops_the_run(train_actions, eval_actions, tmp_path):
    outer_loop = experiment(*train_actions, evals=[eval_actions], directory=tmp_path)
    state, outputs = outer_loop(STATE, BATCHES, 100, 10, eval_specs=[EvalSpec(BATCHES[:2])])
    assert int(state.step) == 20 and outputs[STOP_LOOP] is True
    assert len(outputs["loss"]) == 10
    assert (tmp_path / "STOPPED").exists()


def test_ctrl_c_returns_the_state_and_the_next_call_continues(tmp_path, logs, interrupted):
    outer_loop = experiment(directory=tmp_path, saves=1)
    state, outputs = outer_loop(STATE, interrupted(BATCHES, 24), 100, 10)
    assert int(state.step) == 25 and len(outputs["loss"]) == 5 and outputs[STOP_LOOP]
    assert checkpoint.all_steps(tmp_path)[-1] == 25
    assert "Stopped by Ctrl-C at step 25; saving its state." in logs.text
    assert not (tmp_path / "STOPPED").exists()
    state, _ = outer_loop(state, itertools.cycle(BATCHES), 100, 10)
    assert int(state.step) == 100 and (tmp_path / "STOPPED").exists()


# Resuming --------------------------------------------------------------------------------------------


def resumable(directory, total, batches=BATCHES):
    return experiment(directory=directory, saves=1)(STATE, batches, total, 10)


def test_a_run_resumes_from_its_newest_checkpoint(tmp_path, assert_same, logs):
    expected, _ = resumable(tmp_path / "unbroken", 60)
    resumable(tmp_path / "broken", 30)
    state, outputs = resumable(tmp_path / "broken", 60, BATCHES)
    assert_same(state, expected)
    assert len(outputs["loss"]) == 10
    assert f"Resumed at step 30 from {tmp_path / 'broken'}" in logs.text
    state, outputs = resumable(tmp_path / "broken", 60, BATCHES)
    assert int(state.step) == 60 and outputs is None


def test_a_run_that_starts_from_scratch_says_so(tmp_path, logs, warnings_logged):
    resumable(tmp_path / "new", 20)
    assert f"No checkpoint found in {tmp_path / 'new'}: the run starts from scratch." in logs.messages
    assert warnings_logged() == []  # The directory is its own, so this is the first start.
    OuterLoop(TrainLoop(STEP), checkpoint_spec=CheckpointSpec(tmp_path / "typo"))(STATE, BATCHES, 20)
    assert warnings_logged()[0] == f"No checkpoint found in {tmp_path / 'typo'}: the run starts from scratch."


def test_a_new_run_does_not_save_among_the_checkpoints_of_another_run(tmp_path):
    resumable(tmp_path, 20)
    outer_loop = experiment(directory=tmp_path, saves=1, checkpoint_spec=None)
    with pytest.raises(ValueError, match=r"starts at step 0, and the directory has checkpoints up to step 20. Resume"):
        outer_loop(STATE, BATCHES, 20, 10)
    outer_loop(STEP.restore_model(STATE, tmp_path), BATCHES, 40, 10)
    assert checkpoint.all_steps(tmp_path) == [20, 30, 40]


@pytest.mark.parametrize("home", ["~/", ""], ids=["home", "relative"])
def test_paths_are_resolved_when_the_objects_are_made(tmp_path, monkeypatch, home):
    before, after = tmp_path / "before", tmp_path / "after"
    for directory in (before, after):
        directory.mkdir()
    monkeypatch.setenv("HOME", str(before))
    monkeypatch.chdir(before)
    summary = actions.SummaryAction(actions.default_writer(f"{home}events"))
    outer_loop = experiment(summary, directory=f"{home}run", saves=every(steps=5), workdir=f"{home}work")
    monkeypatch.setenv("HOME", str(after))
    monkeypatch.chdir(after)
    outer_loop(STATE, BATCHES, 10)
    assert sorted(path.name for path in before.iterdir()) == ["events", "run", "work"]
    assert sorted(after.iterdir()) == [] and (before / "run" / "STOPPED").exists()


def test_a_stale_stopped_file_is_removed_while_training(tmp_path):
    (tmp_path / "STOPPED").touch()

    def look(batches):
        yield batches[0]  # Without this batch, the start would be refused, and change nothing.
        assert not (tmp_path / "STOPPED").exists()
        yield from batches[1:]

    resumable(tmp_path, 10, look(BATCHES))
    assert (tmp_path / "STOPPED").exists() and os.path.getsize(tmp_path / "STOPPED") == 0


def test_an_unwritable_checkpoint_directory_raises_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    iterator = iter(BATCHES)
    outer_loop = OuterLoop(TrainLoop(STEP), checkpoint_spec=CheckpointSpec(tmp_path / "file" / "checkpoints"))
    with pytest.raises(OSError, match="Can't write to the directory .*checkpoints"):
        outer_loop(STATE, iterator, 10)
    assert int(STATE.step) == 0 and len(list(iterator)) == 100


def test_an_exception_saves_the_last_completed_step_and_closes_everything(tmp_path, writer):
    note = Record()
    outer_loop = experiment(note, actions.SummaryAction(writer), directory=tmp_path, saves=1)
    with pytest.raises(OSError, match="the network is gone") as caught:
        outer_loop(STATE, then_fail(BATCHES[:25]), 100, 10)
    assert "in the dataset, after step 25" in caught.value.__notes__[0]
    assert checkpoint.all_steps(tmp_path) == [10, 20, 25]
    assert int(outer_loop.rescued_state.step) == 25
    assert note.closed == 1 and writer.flushes >= 2  # Before the saves are committed, and at the end.
    assert not (tmp_path / "STOPPED").exists()
    state, _ = outer_loop(STATE, BATCHES[25:], 40, 10)
    assert int(state.step) == 40 and outer_loop.rescued_state is None


def test_the_last_completed_step_is_rescued_even_after_a_save(tmp_path, data_parallel):
    """A save in the background may keep the buffers of an older state alive."""
    step, state, batches = examples.tiny_regression(partitioner=data_parallel(8))
    outer_loop = experiment(step=step, directory=tmp_path, saves=1)
    with pytest.raises(OSError, match="the network is gone"):
        outer_loop(state, then_fail(batches[:17]), 100, 10)
    assert int(outer_loop.rescued_state.step) == 17
    assert checkpoint.all_steps(tmp_path) == [10, 17]


@pytest.mark.parametrize(
    ("step_actions", "loop_actions", "note", "saved"),
    [
        ([Fail(every(steps=15))], [], "in Fail(interval=every(steps=15)), after step 15", [10, 15]),
        ([], [Fail(2)], "in Fail(interval=2), after step 20", [10, 20]),
    ],
    ids=["of a step", "of a loop"],
)
def test_an_error_in_an_action_loses_nothing(step_actions, loop_actions, note, saved, tmp_path):
    step, state, batches = examples.tiny_regression(end_actions=step_actions)
    outer_loop = experiment(*loop_actions, step=step, directory=tmp_path, saves=1)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        outer_loop(state, batches, 100, 10)
    assert note in caught.value.__notes__[0]
    assert checkpoint.all_steps(tmp_path) == saved and int(outer_loop.rescued_state.step) == saved[-1]


def test_a_second_call_does_not_go_back_to_an_older_checkpoint(tmp_path, logs):
    outer_loop, iterator = experiment(directory=tmp_path, saves=2), iter(BATCHES)
    state, _ = outer_loop(STATE, iterator, 30, 10)
    assert checkpoint.all_steps(tmp_path) == [20]
    state, _ = outer_loop(state, iterator, 40, 10)
    assert int(state.step) == 40 and len(list(iterator)) == 60
    assert "The run continues at step 30, which is past the newest checkpoint (step 20)." in logs.messages


def test_an_error_in_close_is_raised_unless_another_is_propagating():
    failing, after = Fail(every(steps=30), RuntimeError("the action failed")), Record()
    outer_loop = experiment(Record(close=raising(OSError("can't close"))), failing, after)
    with pytest.raises(OSError, match="can't close"):
        outer_loop(STATE, BATCHES, 20, 10)
    assert after.closed == 1
    with pytest.raises(RuntimeError, match="the action failed"):
        outer_loop(STATE, BATCHES, 40, 10)
    assert after.closed == 2


# Continuous evaluation -------------------------------------------------------------------------------


def continuous(directory, note, **options):
    spec = CheckpointSpec(directory, **options)
    outer_loop = OuterLoop(eval_loops=[EvalLoop(STEP, end_actions=[note])], checkpoint_spec=spec)
    return outer_loop(STATE, eval_specs=[EvalSpec(BATCHES[:4])])


def test_an_evaluation_that_waits_for_a_missing_directory_warns(tmp_path, warnings_logged):
    waiting = f"Waiting for checkpoints in {tmp_path / 'missing'}, which doesn't exist yet."
    for directory, expected in [(tmp_path, []), (tmp_path / "missing", [waiting])]:
        continuous(directory, Record(), iterate_stop_fn=lambda: True)
        assert [text for text in warnings_logged() if text.startswith("Waiting")] == expected


def test_checkpoints_are_evaluated_as_they_appear_until_training_stops(tmp_path):
    def slow(batches):
        for number, batch in enumerate(batches):
            if number % 10 == 0:
                time.sleep(0.1)
            yield batch

    trainer = threading.Thread(target=resumable, args=(tmp_path, 30, slow(BATCHES)))
    trainer.start()
    note = Record()
    state, outputs = continuous(tmp_path, note)
    trainer.join()
    assert note.seen == [10, 20, 30]
    restored = STEP.restore_model(state, tmp_path)
    assert outputs["loss"] == EvalLoop(STEP)(restored, BATCHES[:4])[1]["loss"]


@pytest.mark.parametrize("moment", ["before it is read", "after it was read"])
def test_a_checkpoint_deleted_while_it_is_restored_is_skipped(moment, tmp_path, monkeypatch, warnings_logged):
    resumable(tmp_path, 30)
    restore = checkpoint.restore

    def delete():
        for step_num in (10, 20):
            shutil.rmtree(tmp_path / str(step_num), ignore_errors=True)

    def restore_while_it_is_deleted(directory, step_num, *args, **kwargs):
        if step_num == 20 and moment == "before it is read":
            delete()
        restored = restore(directory, step_num, *args, **kwargs)
        if step_num == 20:
            delete()
        return restored

    monkeypatch.setattr(checkpoint, "restore", restore_while_it_is_deleted)
    note = Record()
    continuous(tmp_path, note)
    assert note.seen == [10, 30]
    assert "The checkpoint of step 20 was deleted before it could be evaluated." in warnings_logged()


def test_a_damaged_checkpoint_raises_in_a_continuous_evaluation(tmp_path):
    resumable(tmp_path, 20)
    shutil.rmtree(tmp_path / "20" / "default")
    note = Record()
    with pytest.raises(checkpoint.CheckpointError, match="20"):
        continuous(tmp_path, note)
    assert note.seen == [10]


def test_the_initial_state_is_not_evaluated_if_all_checkpoints_are_deleted(tmp_path):
    resumable(tmp_path, 20)

    def delete_all(step_num, **_):
        seen.append(step_num)
        shutil.rmtree(tmp_path / "10")
        shutil.rmtree(tmp_path / "20")

    seen = []
    continuous(tmp_path, Do(delete_all))
    assert seen == [10]


def test_a_stop_function_replaces_the_stopped_file(tmp_path):
    resumable(tmp_path, 10)
    (tmp_path / "STOPPED").unlink()
    asked, contexts = [], []
    spec = CheckpointSpec(tmp_path, iterate_stop_fn=lambda: asked.append(1) or len(asked) == 3)
    outer_loop = OuterLoop(eval_loops=[EvalLoop(STEP)], checkpoint_spec=spec)
    outer_loop(STATE, eval_specs=[EvalSpec(BATCHES[:1], should_eval_fn=lambda c: contexts.append(c) or True)])
    assert len(asked) == 3
    assert contexts == [EvalContext(is_continuous_eval=True, step_num=10, loop_count=0)]


# Unused actions and bad arguments --------------------------------------------------------------------


UNINTENDED = {
    "a CheckpointAction that counts loops in a run of one loop": (
        lambda directory: {"end_actions": [actions.CheckpointAction(directory)], "log_interval": every(steps=10)},
        {},
        r"it saves once, at the end, and a killed run would start over. Write interval=every\(time=600\) \| last\(\)",
    ),
    "a history of one row": (lambda _: {}, {"train_total_steps": 101}, "history gets one row of the training, at the"),
    "early stopping that can't act": (
        lambda _: {"end_actions": [actions.EarlyStoppingAction("loss", patience=4)]},
        {"train_loop_steps": 10},
        "called 4 times, .* and patience=4 needs at least 5 measurements",
    ),
}


@pytest.mark.parametrize("mistake", UNINTENDED)
def test_a_run_warns_at_its_start_of_what_will_not_happen(mistake, tmp_path, warnings_logged):
    make_options, call, message = UNINTENDED[mistake]
    options, state, spec = make_options(tmp_path), STATE, EvalSpec(BATCHES[:1])
    outer_loop = experiment(*options.pop("end_actions", ()), evals=[[]], **options)
    for total in (40, 41):  # The second call doesn't repeat the warning.
        call = {"train_total_steps": total, **call}
        state, _ = outer_loop(state, BATCHES * 2, eval_specs=[spec], **call)
    assert sum(bool(re.search(message, text)) for text in warnings_logged()) == 1


def test_a_workdir_saves_nothing_where_an_explicit_checkpoint_spec_resumes(tmp_path, warnings_logged):
    resumable(tmp_path / "old", 20)
    spec = CheckpointSpec(tmp_path / "old", restore_data=False)
    OuterLoop(TrainLoop(STEP), checkpoint_spec=spec, workdir=tmp_path / "new")(STATE, BATCHES, 30)
    assert checkpoint.all_steps(tmp_path / "old") == [10, 20]
    assert any("has no CheckpointAction, so a killed run would start over" in text for text in warnings_logged())


def test_a_resumed_run_does_not_warn_of_what_happened_before(tmp_path, warnings_logged):
    for total in (95, 100):
        end_actions = Record(every(30)), actions.EarlyStoppingAction("loss", patience=8)
        outer_loop = experiment(*end_actions, evals=[[]], workdir=tmp_path, log_interval=every(steps=40))
        outer_loop(STATE, BATCHES, total, 10, eval_specs=[EvalSpec(BATCHES[:1], interval=every(50))])
    assert not [text for text in warnings_logged() if text.startswith("In ")]


def test_the_check_at_the_start_reads_no_batch_and_compiles_nothing(logs):
    def batches():
        for batch in BATCHES[:4]:
            logging.info("read a batch")
            yield batch

    step, state, _ = examples.tiny_regression()
    at_start = Do(print, 10, begin_run=lambda step_num, **_: logs.clear())
    experiment(at_start, step=step)(state, batches(), train_total_steps=4, train_loop_steps=2)
    found = [text for text in logs.messages if re.match("In Do|read a batch|Compiling", text)]
    assert found[0].startswith("In Do(interval=10) of the train loop: It would never be called: interval=10 counts")
    assert found.count("read a batch") == 3 and any(text.startswith("Compiling") for text in found)


def test_a_run_logs_where_it_saves_where_it_resumes_and_why_it_stops_early(tmp_path, caplog):
    logging.set_verbosity(logging.WARNING)  # The default in a program that doesn't call absl.app.run.
    for total, action in [(20, None), (40, Stop(5)), (60, actions.EarlyStoppingAction("loss", 1, min_delta=1e9))]:
        directory = tmp_path / ("other" if total == 60 else "run")
        OuterLoop(TrainLoop(STEP, end_actions=action and [action]), workdir=directory)(STATE, BATCHES, total, 5)
    *lines, last_line = caplog.messages
    assert lines == [
        f"The run saves checkpoints in {tmp_path}/run/checkpoints.",
        f"Resumed at step 20 from {tmp_path}/run/checkpoints.",
        "Stopped at step 25 by Stop(interval=5).",
        f"The run saves checkpoints in {tmp_path}/other/checkpoints.",
    ]
    assert last_line.startswith("Stopped at step 10: loss has not imp")


# A work directory ------------------------------------------------------------------------------------


def test_a_run_with_a_workdir_saves_and_resumes_on_its_own(tmp_path, assert_same):
    def run(total, directory, **options):
        outer_loop = OuterLoop(TrainLoop(STEP), workdir=directory, **options)
        return outer_loop(STATE, BATCHES, total, 10)[0]

    whole = run(45, tmp_path / "whole")
    run(25, tmp_path / "parts")
    assert checkpoint.all_steps(tmp_path / "parts" / "checkpoints") == [25]
    assert_same(run(45, tmp_path / "parts"), whole)
    run(25, tmp_path / "none", checkpoint_spec=None)
    assert not (tmp_path / "none" / "checkpoints").exists()
    assert OuterLoop(TrainLoop(STEP)).checkpoint_spec is None


def test_a_run_with_a_workdir_saves_every_minute(tmp_path, set_clock):
    set_clock(itertools.count(step=25).__next__)  # Each step takes more than 25 seconds.
    saved = lambda *_: checkpoint.all_steps(tmp_path / "checkpoints")
    OuterLoop(TrainLoop(STEP), workdir=tmp_path)(STATE, BATCHES, 10, 10)
    assert len(saved()) > 1 and saved()[-1] == 10


def test_a_checkpoint_action_of_the_loop_replaces_the_one_of_the_workdir(tmp_path):
    def run(total):
        action = actions.CheckpointAction(tmp_path / "mine", every(steps=10))
        return OuterLoop(TrainLoop(STEP, end_actions=[action]), workdir=tmp_path)(STATE, BATCHES, total, 10)[0]

    run(20)
    assert int(run(30).step) == 30
    assert checkpoint.all_steps(tmp_path / "mine") == [10, 20, 30]
    assert not (tmp_path / "checkpoints").exists()


def start(*loops, **options):
    """Starts a run of 10 steps with an evaluation, or with other loops and arguments, which makes no step."""
    arguments = {"train_dataset": BATCHES, "train_total_steps": 10, "eval_specs": [EvalSpec(BATCHES)], **options}
    try:
        OuterLoop(*(loops or (TrainLoop(STEP), [EvalLoop(STEP)])))(STATE, **arguments)
    finally:
        assert int(STATE.step) == 0


def spec(**options):
    return EvalSpec(**{"dataset": [], **options})


IN_WRONG_PLACES = r"got train_loop=.* Write OuterLoop\(train_loop, \[eval_loop\]\)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: start(train_total_steps=0), ValueError, "train_total_steps must be a positive int or None, got 0"),
        (lambda: start(train_total_steps=1.5), TypeError, "train_total_steps must be a positive int or None, got 1.5"),
        (lambda: start(train_loop_steps=0), ValueError, "train_loop_steps must be a positive int or None, got 0"),
        (lambda: start(train_epochs=0), ValueError, "train_epochs must be a positive int"),
        (lambda: start(train_epochs=2, train_loop_steps=5), ValueError, "train_epochs=2 and train_loop_steps=5"),
        (lambda: start(train_epochs=2, train_dataset=iter([])), ValueError, "can be read more than once"),
        (lambda: start(train_epochs=2, train_dataset=[]), ValueError, "yielded no batches"),
        (lambda: start(train_dataset=None), TypeError, "without a batch, because the dataset is None. If the step"),
        (lambda: start(train_dataset=None, train_total_steps=None), ValueError, "train_loop without a train_dataset"),
        (lambda: start(train_dataset="train"), TypeError, "A dataset must be an iterator"),
        (lambda: start(None, [EvalLoop(STEP)]), ValueError, "got a train_dataset without a train_loop"),
        (lambda: start(eval_specs=[]), ValueError, "has 1 eval_loops and was called with 0 eval_specs"),
        (lambda: start(eval_specs=[None]), TypeError, "eval_specs must contain EvalSpecs, got None"),
        (lambda: start(eval_specs=spec()), TypeError, r"must be a list of EvalSpecs.*eval_specs=\[eval_spec\]"),
        (
            lambda: start(TrainLoop(STEP), [EvalLoop(STEP), EvalLoop(STEP)], eval_specs=[spec(name="test")] * 2),
            ValueError,
            "Two EvalSpecs are named 'test'",
        ),
        (OuterLoop, ValueError, "it got neither"),
        (lambda: OuterLoop(TrainLoop(STEP), EvalLoop(STEP)), TypeError, IN_WRONG_PLACES),
        (lambda: OuterLoop(EvalLoop(STEP), [TrainLoop(STEP)]), TypeError, IN_WRONG_PLACES),
        (lambda: OuterLoop(TrainLoop(STEP), [EvalLoop(STEP)] * 2), ValueError, "OuterLoop got the same loop twice"),
        (lambda: OuterLoop(TrainLoop(STEP), checkpoint_spec="runs"), TypeError, "checkpoint_spec must .* got 'runs'"),
        (lambda: OuterLoop(TrainLoop(STEP), log_interval=0), ValueError, "OuterLoop.log_interval must .* got 0"),
        (lambda: CheckpointSpec("somewhere", -1), ValueError, "iterate_interval_secs must be at least 0, got -1"),
        (lambda: spec(num_steps=0), ValueError, "EvalSpec.num_steps must be a positive int or None, got 0"),
        (lambda: spec(eval_loop_interval=-1), ValueError, "EvalSpec.eval_loop_interval must be a pos.*, got -1"),
        (lambda: spec(dataset=None), ValueError, "EvalSpec needs a dataset"),
        (lambda: spec(dataset_iterator=iter([])), ValueError, "needs num_steps, got None"),
        (lambda: spec(interval=0), ValueError, "EvalSpec.interval must be .*positive.*got 0"),
        (lambda: spec(interval=every(5), eval_loop_interval=2), ValueError, "Give one of them"),
        (lambda: spec(name="train"), ValueError, "other than 'train'"),
        (lambda: spec(name="a/b"), ValueError, "without / and ., .* got 'a/b'"),
    ],
)
def test_bad_arguments_raise_before_the_first_step(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_an_indivisible_training_batch_loses_nothing(tmp_path, data_parallel):
    step, state, batches = examples.tiny_regression(partitioner=data_parallel(8))
    dataset = [*batches[:14], {name: leaf[:5] for name, leaf in batches[14].items()}]
    outer_loop = experiment(step=step, directory=tmp_path, saves=100)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 5 rows.*8 devices of mesh axis 'data'"):
        outer_loop(state, dataset, 15)
    assert checkpoint.all_steps(tmp_path) == [14]


# One directory, one run -------------------------------------------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_two_runs_in_one_workdir_do_not_mix_their_rows(tmp_path, trains):
    train_loop, eval_loops = (TrainLoop(STEP), []) if trains else (None, [EvalLoop(STEP)])
    outer_loop = OuterLoop(train_loop, eval_loops, workdir=tmp_path)
    options = {"train_dataset": BATCHES, "train_total_steps": 2} if trains else {"eval_specs": [EvalSpec(BATCHES)]}
    own, other = (lock.TRAINER, lock.EVALUATOR) if trains else (lock.EVALUATOR, lock.TRAINER)
    with lock.locked(tmp_path, other):  # The rows of this run are in a different file.
        state, _ = in_a_thread(outer_loop, STATE, **options)
    before = {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")}
    with lock.locked(tmp_path, own):
        with pytest.raises(lock.DirectoryInUseError, match="is in use by process"):
            in_a_thread(outer_loop, state, **options)
        report = in_a_thread(outer_loop.check, state, **options)
    assert any(finding.where.startswith("the work directory") for finding in report.problems)
    assert {path.name: path.read_text() for path in tmp_path.glob("*.jsonl")} == before


def test_a_workdir_moved_during_the_run_raises(tmp_path):
    move = Do(lambda **_: (tmp_path / "run").rename(tmp_path / "moved"), 2)
    outer_loop = experiment(move, checkpoint_spec=None, workdir=tmp_path / "run")
    with pytest.raises(lock.DirectoryLostError, match="run is no longer the one"):
        outer_loop(STATE, BATCHES, 4, 2)


def test_one_of_two_trainers_in_one_directory_is_refused(tmp_path):
    def train(*others):
        return experiment(*others, directory=tmp_path, saves=every(2))(STATE, BATCHES, 1)[0]

    def train_at_the_same_time(**_):
        with pytest.raises(lock.DirectoryInUseError):
            in_a_thread(train)

    assert int(train(Do(train_at_the_same_time)).step) == 1


def test_a_failed_save_after_ctrl_c_raises(tmp_path, interrupted, monkeypatch):
    outer_loop = experiment(directory=tmp_path, saves=every(steps=100))
    monkeypatch.setattr(seal, "write", raising(errno.EROFS))
    with pytest.raises(checkpoint.CheckpointError, match="step 3 .*Read-only file system"):
        outer_loop(STATE, interrupted(BATCHES, 2))


@pytest.mark.parametrize(
    ("train", "evaluation", "message"),
    [
        ({"end_actions": ["curves"]}, ["curves"], "any output of the same name to .*as that of .*prefix='eval/'"),
        ({"begin_actions": ["curves"]}, [], "is one of the begin_actions, which receive no outputs. Add it to the end"),
        ({}, ["checkpoints"], "saves states in evaluations only, .* Add it to the end_actions of the train loop"),
    ],
)
def test_a_run_names_an_action_in_the_wrong_place(train, evaluation, message, tmp_path, writer, warnings_logged):
    make = {"curves": lambda: actions.SummaryAction(writer), "checkpoints": lambda: actions.CheckpointAction(tmp_path)}
    train = {place: [make[name]() for name in names] for place, names in train.items()}
    eval_loop = EvalLoop(EVAL_STEP, end_actions=[make[name]() for name in evaluation])
    OuterLoop(TrainLoop(STEP, **train), [eval_loop])(STATE, BATCHES, 20, 10, eval_specs=[EvalSpec(BATCHES[:2])])
    assert len([text for text in warnings_logged() if re.search(message, text)]) == 1, warnings_logged()


# Warnings at the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("loop_steps", [10, None])
def test_a_run_that_ends_with_a_nan_warns_once(loop_steps, warnings_logged):
    spoilt = [{**batch, "y": batch["y"] * np.float32(np.nan)} if n == 12 else batch for n, batch in enumerate(BATCHES)]
    outer_loop = OuterLoop(TrainLoop(STEP))
    outer_loop(STATE, spoilt[:30], train_loop_steps=loop_steps)
    (warning,) = [text for text in warnings_logged() if "NaN" in text]
    assert warning.startswith("The run ended at step 30 with NaN in its last loop: loss. TrainLoop(nan_policy='raise')")
