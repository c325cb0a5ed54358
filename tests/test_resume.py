"""Tests of resuming: mismatches, warnings, signals and locks."""

import os
import shutil
import signal

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from programs.acts import Do, lengths, then_fail
from programs.tiny import BATCHES, EVAL_STEP, STATE, STEP, experiment

from jaxloop import (
    STOP_LOOP,
    CheckpointAction,
    CheckpointSpec,
    EarlyStoppingAction,
    EvalLoop,
    EvalSpec,
    OuterLoop,
    SummaryAction,
    TrainLoop,
    at,
    checkpoint,
    data,
    every,
    last,
)
from jaxloop import functional as jf

BY_INDEX = data.from_index(lambda number: BATCHES[number % 100])


def run(directory, total=10, dataset=None, *, step=STEP, train_actions=(), save=5, restore_data=True, **options):
    """Trains with a checkpoint every `save` steps, and returns the outer loop and the state."""
    save = CheckpointAction(directory, every(steps=save))
    spec = CheckpointSpec(directory, restore_data=restore_data)
    outer_loop = OuterLoop(TrainLoop(step, end_actions=[*train_actions, save], stat_names=[]), checkpoint_spec=spec)
    state, _ = outer_loop(STATE, BATCHES if dataset is None else dataset, total, **options)
    return outer_loop, state


def test_resuming_with_different_keys_raises(tmp_path):
    run(tmp_path)
    other = type(STEP)(jax.random.key(7), STEP.model, STEP.optimizer, train=True)
    with pytest.raises(ValueError, match="different PRNG keys .*made from the same seed, or use a different dir"):
        run(tmp_path, 20, step=other)


def test_resuming_with_different_data_raises_unless_restore_data_is_false(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="of the kind 'sequence', .* of the kind 'index'") as caught:
        run(tmp_path, 20, BY_INDEX)
    assert "CheckpointSpec(..., restore_data=False)" in caught.value.__notes__[0]
    assert int(run(tmp_path, 20, BY_INDEX, restore_data=False)[1].step) == 20


def test_a_refused_start_changes_neither_the_history_nor_the_stopped_file(tmp_path):
    outer_loop, _ = run(tmp_path, 12, save=5, train_loop_steps=2)
    loop, other_loop = outer_loop.train_loop, TrainLoop(type(STEP)(jax.random.key(7), nn.Dense(2), train=True))
    eval_loop, specs = EvalLoop(EVAL_STEP), [EvalSpec(BATCHES[:2])]
    other_state = other_loop.step.initialize_model([1, 3])
    new_run = lambda: experiment(checkpoint_spec=None, workdir=tmp_path)
    spec = CheckpointSpec(tmp_path)
    evaluation = OuterLoop(None, [eval_loop], spec, workdir=tmp_path)
    evaluation(STATE, eval_specs=specs)
    written = [tmp_path / name for name in ("history.jsonl", "eval_history.jsonl", "STOPPED")]
    before = [path.read_bytes() for path in written]
    for outer_loop, args, message in [
        (OuterLoop(loop, None, None, workdir=tmp_path), (STATE, BATCHES, 20), "the checkpoints of another run"),
        (OuterLoop(loop, None, spec), (STATE, BY_INDEX, 20), "of the kind 'sequence'"),
        (OuterLoop(other_loop, None, spec), (other_state, BATCHES, 20), "does not fit"),
        (new_run(), (STATE, [], 20), "yielded no batches"),
        (new_run(), (STATE, (batch for batch in ()), 20), "yielded no batches"),
        (evaluation, (other_state, None, None, None, specs), "does not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            outer_loop(jax.tree.map(jax.numpy.copy, args[0]), *args[1:])
        assert [path.read_bytes() for path in written] == before


def test_a_signal_hides_the_error_that_it_causes_in_the_first_batch(tmp_path, warnings_logged):
    def failing(is_signalled):
        if is_signalled:
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("a worker died")
        yield

    with pytest.raises(RuntimeError, match="a worker died") as caught:
        run(tmp_path, dataset=failing(is_signalled=False))
    assert caught.value.__notes__[0].startswith("in the dataset, after step 0, in TrainLoop(")
    assert int(run(tmp_path, dataset=failing(is_signalled=True))[1].step) == 0
    assert any("The data failed after Ctrl-C" in text for text in warnings_logged())


def test_a_changed_hyperparameter_causes_a_warning_and_can_be_taken(tmp_path, warnings_logged):
    def learning_rate(total, rate, **options):
        injected = optax.inject_hyperparams(optax.sgd)(rate, momentum=optax.linear_schedule(0.0, 0.9, 10))
        step = type(STEP)(STEP.base_prng, STEP.model, optax.chain(optax.clip(1.0), injected), train=True)
        spec = CheckpointSpec(tmp_path, **options)
        outer_loop = experiment(step=step, directory=tmp_path, saves=every(steps=5), checkpoint_spec=spec)
        state, _ = outer_loop(step.initialize_model([1, 3]), BATCHES, total)
        return float(state.opt_state[1].hyperparams["learning_rate"])

    assert [learning_rate(total, 0.5) for total in (5, 10)] == [0.5, 0.5] and not warnings_logged()
    assert learning_rate(15, 0.25) == 0.5
    told = "opt_state/1/hyperparams/learning_rate is 0.25 in the program, and 0.5 in the checkpoint. The run continues "
    assert warnings_logged()[0].startswith(f"{told}with 0.5. CheckpointSpec(..., restore_hyperparams=False) takes")
    assert learning_rate(20, 0.25, restore_hyperparams=False) == 0.25
    assert warnings_logged()[1].startswith(f"{told}with 0.25.") and len(warnings_logged()) == 2
    assert learning_rate(25, 0.25) == 0.25 and len(warnings_logged()) == 2


def test_data_without_a_position_are_used_as_they_come_with_a_warning(tmp_path, warnings_logged):
    batches = []
    run(tmp_path, 10, (batch for batch in BATCHES))
    run(tmp_path, 15, (batches.append(batch) or batch for batch in BATCHES))
    assert batches[0] is BATCHES[0]
    (warning,) = [text for text in warnings_logged() if "can't be restored" in text]
    words = "after 10 batches", "skippable", "continues with the next batch that the training dataset returns"
    assert not [each for each in words if each not in warning]


def early_stopped(directory, when, patience=2, total=40, stop=None):
    stopping = EarlyStoppingAction("eval/loss", patience, mode="max", restore_best=True, interval=every(steps=5))
    outer_loop = experiment(stopping, directory=directory, saves=when, evals=[[]])
    specs = [EvalSpec(BATCHES[:2], interval=every(steps=5))]
    return outer_loop(STATE, BATCHES, total, eval_specs=specs, stop=stop)[0]


@pytest.mark.parametrize(
    "length",
    [{"total": 10}, {"total": None, "stop": at(10)}, {"total": None, "dataset": BATCHES[:10], "train_epochs": 1}],
)
def test_a_resumed_run_that_has_nothing_left_to_train_is_at_its_last_step(length, tmp_path):
    ends = [run(tmp_path, **length)[0].train_loop.elapsed for _ in range(2)]
    assert [(end.steps, end.is_last) for end in ends] == [(10, True)] * 2


@pytest.mark.parametrize("when", [every(steps=5), last()], ids=["a save at the stop", "a save at the end"])
def test_a_run_that_an_action_stopped_does_not_continue(when, tmp_path, warnings_logged):
    state = early_stopped(tmp_path, when)
    assert int(state.step) == 5 and checkpoint.all_steps(tmp_path)[-1] == 15  # The loss only falls.
    again = early_stopped(tmp_path, when)
    assert "step 15 has reached the end of a run that an evaluation or an action stopped" in str(warnings_logged())
    assert jax.tree.all(jax.tree.map(np.array_equal, again, state))  # The best state, which the checkpoint contains.


@pytest.mark.parametrize(
    ("options", "end", "same", "when"),
    [
        ({"patience": 4}, 25, {"patience": 4}, every(steps=5)),
        ({"total": 60}, 15, None, every(steps=5)),
        ({"total": 60}, 15, None, last()),
        ({"patience": 9}, 40, {"patience": 9}, last()),
    ],
    ids=["more patience", "more steps", "more steps, saved at the end", "enough patience"],
)
def test_a_stopped_run_continues_only_with_more_patience(options, end, same, when, tmp_path, assert_same):
    early_stopped(tmp_path / "run", when)
    assert checkpoint.all_steps(tmp_path / "run")[-1] == 15
    best = early_stopped(tmp_path / "run", when, **options)
    assert checkpoint.all_steps(tmp_path / "run")[-1] == end and int(best.step) == 5
    if same is not None:
        early_stopped(tmp_path / "whole", when, **same)
        ends = [checkpoint.restore(tmp_path / name, end, STATE) for name in ("run", "whole")]
        assert_same(*ends)


def test_added_and_removed_actions_cause_warnings(tmp_path, warnings_logged):
    stopping = lambda: EarlyStoppingAction("loss", patience=50, interval=every(steps=5))
    run(tmp_path, 10, train_actions=[stopping()])
    run(tmp_path, 15)
    assert "contains the state of EarlyStoppingAction" in str(warnings_logged())
    run(tmp_path, 20, train_actions=[stopping()])
    assert "was not part of the run when the checkpoint was saved, so it starts fresh" in str(warnings_logged())


def test_sigterm_finishes_the_step_saves_and_exits(tmp_path, writer, assert_same):
    def preempted():
        yield from BATCHES[:7]
        os.kill(os.getpid(), signal.SIGTERM)
        yield from BATCHES[7:]

    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "broken", 20, preempted(), train_actions=[SummaryAction(writer, every(steps=3))])
    assert caught.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    assert checkpoint.all_steps(tmp_path / "broken") == [5, 8]
    assert writer.flushes == 3  # Before each save, and at the end.
    assert not (tmp_path / "broken" / "STOPPED").exists()
    _, state = run(tmp_path / "broken", 20, restore_data=True, dataset=data.skippable(lambda: iter(BATCHES)))
    assert_same(state, run(tmp_path / "whole", 20)[1])


@pytest.mark.parametrize("api", ["objects", "functions"])
def test_after_a_signal_an_error_of_the_data_does_not_hide_it(api, tmp_path, assert_same):
    def batches(fails):
        yield from BATCHES[:7]
        if fails:
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("DataLoader worker (pid 77) is killed by signal: Terminated.")
        yield from BATCHES[7:]

    def experiment(directory, fails):
        dataset = data.skippable(lambda: batches(fails))
        if api == "objects":
            return run(directory, 20, dataset=dataset)[1]
        train = lambda state, batch: STEP(state, batch)[::-1]
        tasks = {jf.every(1): train, jf.every(5): jf.checkpoint(directory, resume=True)}
        return jf.loop(STATE, dataset, tasks, stop=20)[0]

    with pytest.raises(SystemExit) as caught:
        experiment(tmp_path / "broken", fails=True)
    assert caught.value.code == 143 and checkpoint.all_steps(tmp_path / "broken")[-1] == 7
    assert_same(experiment(tmp_path / "broken", fails=False), experiment(tmp_path / "whole", fails=False))


class SlowToClose(CheckpointAction):
    """Receives a signal while it is closed, after the last step."""

    def close(self):
        signal.raise_signal(signal.SIGINT)
        super().close()


def test_a_signal_after_the_last_step_does_not_interrupt_the_run(tmp_path):
    state, _ = experiment(SlowToClose(tmp_path, every(steps=5)), directory=tmp_path)(STATE, BATCHES, 10)
    assert int(state.step) == 10 and (tmp_path / "STOPPED").exists()


def test_the_last_row_is_added_after_a_crash_at_the_end_of_the_data(tmp_path):
    class Dies(BaseException):
        pass

    def logged_steps(dataset):
        outer_loop = experiment(directory=tmp_path, saves=every(steps=5), log_interval=every(steps=4) | last())
        outer_loop(STATE, data.skippable(dataset))
        return outer_loop.history.collect("steps")

    with pytest.raises(Dies):
        logged_steps(lambda: then_fail(BATCHES[:10], Dies()))
    assert checkpoint.all_steps(tmp_path) == [5]
    assert logged_steps(lambda: iter(BATCHES[:10])) == [4, 8, 10]


@pytest.mark.parametrize("lost", ["rare", "often"])
def test_two_checkpoint_actions_resume_from_the_newest_step_and_complete_each_other(lost, tmp_path, assert_same):
    def run_twice_saved(total, directory):
        rare = CheckpointAction(directory / "rare", every(steps=10), keep=None)
        return run(directory / "often", total, train_actions=[rare])[1]

    run_twice_saved(20, tmp_path)
    shutil.rmtree(tmp_path / lost / "20")  # As if a kill had prevented this commit.
    run_twice_saved(20, tmp_path)
    assert checkpoint.all_steps(tmp_path / "rare") == [10, 20]
    assert checkpoint.all_steps(tmp_path / "often")[-1] == 20
    assert_same(*(STEP.restore_model(STATE, tmp_path / name) for name in ("rare", "often")))
    assert_same(run_twice_saved(25, tmp_path), run_twice_saved(25, tmp_path / "uninterrupted"))


def test_an_evaluation_is_not_repeated_if_only_its_action_failed(tmp_path):
    def fail_once(step_num, **_):
        called.append(step_num)
        if called == [5, 10]:
            raise OSError("The disk is gone.")

    def resume():
        save = {"directory": tmp_path, "saves": every(steps=5)}
        outer_loop = experiment(**save, evals=[[Do(fail_once)]], workdir=tmp_path)
        outer_loop(STATE, BATCHES, 15, 5, [EvalSpec(eval_data, eval_loop_interval=1)])
        return outer_loop.history

    evaluated, called = [], []
    eval_data = lambda: evaluated.append(True) or iter(BATCHES[:2])
    with pytest.raises(OSError, match="The disk is gone"):
        resume()
    assert resume().collect("steps", "eval.loss")[0] == [5, 10, 15]
    assert called == [5, 10, 10, 15] and len(evaluated) == 3


@pytest.mark.parametrize("when", [last(), every(steps=7)])
def test_a_stop_within_a_loop_ends_the_loop_even_if_a_signal_comes_at_that_step(when, tmp_path):
    def stop(outputs, **_):
        outputs[STOP_LOOP] = True
        if directory.name == "broken":
            os.kill(os.getpid(), signal.SIGTERM)

    note = lambda step_num, outputs, **_: called.append((directory.name, step_num, len(outputs["loss"])))

    def train():
        outer_loop = experiment(Do(stop, every(steps=7)), Do(note), evals=[[]], workdir=directory)
        outer_loop(STATE, BATCHES, 15, 5, [EvalSpec(BATCHES[:2], interval=when)])
        return [(row.elapsed.steps, row.elapsed.loops, row.logs) for row in outer_loop.history.rows]

    called, directory = [], tmp_path / "whole"
    whole = train()
    directory = tmp_path / "broken"
    with pytest.raises(SystemExit):
        train()
    assert train() == whole and [step for step, *_ in whole] == [5, 7, 7]
    assert [each for each in called if each[0] == "broken"] == [("broken", 5, 5), ("broken", 7, 2)]


def test_what_a_checkpoint_does_not_contain_begins_at_its_step(tmp_path):
    run(tmp_path, 30, BY_INDEX, save=10)
    of_train, of_eval = lengths(every(steps=8)), lengths(2)
    train_loop, eval_loop = TrainLoop(STEP, end_actions=[of_train]), EvalLoop(EVAL_STEP, end_actions=[of_eval])
    train_loop(STATE, BATCHES, 60)  # A call without a checkpoint, which is past it.
    of_train.seen.clear()
    outer_loop = OuterLoop(train_loop, [eval_loop], CheckpointSpec(tmp_path))
    outer_loop(STATE, BY_INDEX, 60, 10, [EvalSpec(BATCHES[:3])])
    assert of_train.seen == [(32, 2), (40, 8), (48, 8), (56, 8)]
    assert of_eval.seen == [(40, 3), (60, 6)]  # After the fourth and the sixth loop.
