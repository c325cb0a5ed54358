import shutil
import subprocess
import sys
import threading
import unittest.mock

import flax
import numpy as np
import pytest
from clu import metrics as clu_metrics
from conftest import RecordingWriter
from orbax import checkpoint as orbax_checkpoint
from programs.acts import Do
from programs.tiny import BATCHES, STATE, STEP

import jaxloop
from jaxloop import actions, checkpoint, every, examples
from jaxloop.checkpoint import seal
from jaxloop.eval_loop import EvalLoop
from jaxloop.metrics import LoopOutputs
from jaxloop.train_loop import TrainLoop
from jaxloop.types import MetricType, MetricWithMetadata


def test_summary_is_the_weighted_mean_since_the_last_summary(writer):
    step, state, batches = examples.tiny_regression()
    loop = TrainLoop(step, end_actions=[actions.SummaryAction(writer, interval=2)], stat_names=[])
    losses = []
    for _ in range(4):
        state, outputs = loop(state, batches, num_steps=5)
        losses += outputs["loss"]
    written = writer.scalars("loss")
    assert [step_num for step_num, _ in written] == [10, 20]
    np.testing.assert_allclose([v for _, v in written], np.mean(np.reshape(losses, [2, 10]).astype(np.float64), axis=1))


def test_each_metric_type_uses_its_writer_method(writer):
    image, sound = np.zeros([2, 8, 8, 1]), np.zeros([1, 100, 1])
    outputs = LoopOutputs(
        {
            "image": [image],
            "video": [MetricWithMetadata(np.zeros([1, 3, 8, 8, 1]), MetricType.VIDEO)],
            "sound": [MetricWithMetadata(sound, MetricType.AUDIO, {"sample_rate": 16_000})],
            "note": [MetricWithMetadata("hello", MetricType.TEXT)],
            "weights": [MetricWithMetadata(np.zeros(5), MetricType.HISTOGRAM, {"num_buckets": 7})],
            "per_example": [np.zeros(4)],
            "lr": [MetricWithMetadata(np.float32(0.5))],
            "private": [MetricWithMetadata(np.zeros(5), MetricType.OTHER)],
        }
    )
    action = actions.SummaryAction(writer)
    action(None, outputs, step_num=7)
    action.flush()
    calls = {call[0].removeprefix("write_"): list(call[2]) for call in writer.written if call[0] != "write_histograms"}
    images_and_sounds = {"images": ["image"], "videos": ["video"], "audios": ["sound"]}
    assert calls == {"scalars": ["lr"], "texts": ["note"], **images_and_sounds}
    histograms = [(list(call[2]), call[3]) for call in writer.written if call[0] == "write_histograms"]
    assert histograms == [(["per_example"], {"num_buckets": None}), (["weights"], {"num_buckets": {"weights": 7}})]
    assert [call[3] for call in writer.written if call[0] == "write_audios"] == [{"sample_rate": 16_000}]
    assert {call[1] for call in writer.written} == {7} and writer.flushes == 1


def test_summary_computes_a_clu_metric_once(writer):
    computed = []

    class Counted(clu_metrics.Average):
        def compute(self):
            computed.append(1)
            return super().compute()

    mean = Counted(total=np.float32(6), count=np.float32(4))
    summary = actions.SummaryAction(writer)
    summary(None, {"mean": [mean, mean]}, step_num=1)
    summary.flush()
    assert writer.scalars("mean") == [(1, 1.5)] and len(computed) == 1


def test_unwritable_outputs_warn_once(writer, warnings_logged):
    @flax.struct.dataclass
    class Means(clu_metrics.Collection):
        loss: clu_metrics.Average.from_output("values")  # pyright: ignore

    means = Means.single_from_model_output(values=np.float32([1, 2]))
    summary = actions.SummaryAction(writer)
    for step_num in range(2):
        outputs = {"nested": [{"a": 1.0}], "vector": [MetricWithMetadata(np.zeros(3))], "none": [None], "loss": [1.0]}
        summary(None, {**outputs, "means": [means]}, step_num=step_num)
    summary.flush()
    assert writer.scalars("means/loss") == [(0, 1.5), (1, 1.5)]
    problems = [f"SummaryAction does not write the output '{name}'" for name in ("nested", "vector")]
    assert [text.split(":")[0] for text in warnings_logged()] == problems
    assert [text.split(":")[0] for text in summary.check(None, outputs)] == problems


def test_standalone_loop_commits_its_checkpoints(tmp_path):
    program = (
        "import sys, jaxloop; from jaxloop import examples; step, state, batches = examples.tiny_regression()\n"
        "loop = jaxloop.TrainLoop(step, end_actions=[jaxloop.CheckpointAction(sys.argv[1])])\n"
        "for _ in range(3): state, _ = loop(state, batches, 5)"
    )
    run = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
    assert checkpoint.all_steps(tmp_path) == [5, 10, 15]
    assert not list(tmp_path.glob("*tmp*"))


def test_checkpoint_action_keeps_only_the_newest_checkpoints(tmp_path, warnings_logged):
    step, state, batches = examples.tiny_regression()
    action = actions.CheckpointAction(tmp_path / "checkpoints", interval=2, keep=2)
    loop = TrainLoop(step, end_actions=[action])
    for _ in range(6):
        state, _ = loop(state, batches, num_steps=5)
    action.close()
    assert checkpoint.all_steps(tmp_path / "checkpoints") == [20, 30]
    action.save(30, state, None)
    assert "already has a checkpoint of step 30, which was not" in warnings_logged()[0]
    action.save(35, state, None)  # This reopens the directory.
    action.close()
    assert checkpoint.all_steps(tmp_path / "checkpoints") == [30, 35]


def test_a_manager_stays_open_for_the_next_run(tmp_path):
    with orbax_checkpoint.CheckpointManager(tmp_path / "checkpoints") as manager:
        action = actions.CheckpointAction(manager)
        _, state, _ = examples.tiny_regression()
        for step_num in (1, 2):
            action.save(step_num, state, None)
            action.close()
            assert checkpoint.all_steps(tmp_path / "checkpoints")[-1] == step_num


def test_save_waits_for_the_previous_save_to_finish(tmp_path, monkeypatch):
    events, gate, write = [], threading.Event(), seal.write

    def slow(path, *args):
        assert gate.wait(10)
        write(path, *args)
        events.append("sealed")

    monkeypatch.setattr(seal, "write", slow)
    action = actions.CheckpointAction(tmp_path)
    action.save(1, STATE, None)  # Returns at once.
    events.append("saved")
    threading.Timer(0.1, gate.set).start()
    action.save(2, STATE, None)
    assert events[:2] == ["saved", "sealed"] and 1 in checkpoint.all_steps(tmp_path)
    assert (action.last_stall_secs or 0) > 0
    action.close()


def test_unwritable_directory_raises_at_once(tmp_path):
    (tmp_path / "file").touch()
    for make in (actions.CheckpointAction, actions.default_writer):
        with pytest.raises(OSError, match="Can't write to the directory .*file"):
            make(tmp_path / "file")
    with pytest.raises(OSError, match="Can't write to the directory /proc/nowhere"):
        actions.CheckpointAction("/proc/nowhere")


# Several runs with the same action --------------------------------------------------------------------------


def batches_until(number, target):
    """Yields batches whose targets grow, and fails at the given one."""
    for index in range(60):
        if index == number:
            raise OSError("the server is gone")
        yield {"x": np.ones([4, 3], np.float32), "y": np.full([4, 1], target * index, np.float32)}


def run(action, target, fail_at, directory):
    step, state, _ = examples.tiny_regression(1)
    tests, spec = EvalLoop(examples.tiny_regression(1, train=False)[0]), jaxloop.CheckpointSpec(directory)
    *_, far = batches_until(None, 2 * target)
    eval_spec = jaxloop.EvalSpec([far], interval=every(steps=10), name="test")
    outer_loop = jaxloop.OuterLoop(TrainLoop(step, end_actions=[action]), [tests], spec)
    state, _ = outer_loop(state, batches_until(fail_at, target), eval_specs=[eval_spec])
    return int(state.step), outer_loop.history.collect("test.loss"), getattr(action, "best_step", None)


ACTIONS = {
    "early stopping": lambda _: actions.EarlyStoppingAction("test/loss", 2, interval=every(steps=10)),
    "checkpoints": lambda path: actions.CheckpointAction(path, every(steps=10), best="test/loss"),
    "spikes": lambda _: actions.SpikeGuard("loss", window=4, interval=every(steps=5)),
    "summaries": lambda _: actions.SummaryAction(RecordingWriter(), every(steps=10)),
}


@pytest.mark.parametrize("make", ACTIONS.values(), ids=ACTIONS)
def test_an_action_forgets_a_failed_run_when_the_next_run_begins_earlier(make, tmp_path, warnings_logged):
    used = make(tmp_path / "used")
    with pytest.raises(OSError, match="server is gone"):
        run(used, 1.0, 18, tmp_path / "used")
    if (tmp_path / "used").exists():
        shutil.copytree(tmp_path / "used", tmp_path / "new")
    assert run(used, 9.0, None, tmp_path / "used") == run(make(tmp_path / "new"), 9.0, None, tmp_path / "new")
    assert not any("twice" in text for text in warnings_logged())


def test_arguments_have_the_names_of_the_docs_and_of_the_peer_library(tmp_path, writer):
    assert actions.CheckpointAction(directory=tmp_path).directory == tmp_path
    assert actions.CheckpointAction(ckpt_manager=tmp_path).directory == tmp_path
    kind = actions.SummaryAction
    assert kind(writer=writer).summary_writer is kind(summary_writer=writer).summary_writer is writer
    assert kind(unittest.mock.Mock())  # Has every attribute.


class Narrow(actions.Action):
    def __call__(self, state, outputs, *, step_num): ...


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: actions.SummaryAction(None), TypeError, r"writer= first \(also called summary_writer=\), got None"),
        (lambda: actions.CheckpointAction(None), TypeError, r"directory= first \(.* ckpt_manager=\), got None"),
        (lambda: actions.CheckpointAction(every(3)), TypeError, r"=.*got \{'directory': every\(steps=3\)\}"),
        (lambda: actions.CheckpointAction("a", ckpt_manager="b"), TypeError, "{'directory': 'a', 'ckpt_manager': 'b'}"),
        (lambda: jaxloop.CheckpointSpec(None), TypeError, "CheckpointSpec takes the path of a directory, got None"),
        (lambda: Narrow(every(10)), TypeError, r"__call__ can't be called as \(.*'elapsed'.*step_num, \*\*kwargs\)"),
        (lambda: Narrow("2"), TypeError, "Narrow.interval must be a positive int, or a schedule"),
        (lambda: Narrow(True), TypeError, "Narrow.interval must be a positive int, or a schedule"),
        (lambda: Narrow(1.5), TypeError, "Narrow.interval must be a positive int, or a schedule"),
        (lambda: Narrow(0), ValueError, "Narrow.interval must be a positive int, or a schedule"),
        (lambda: Narrow(-1), ValueError, "Narrow.interval must be a positive int, or a schedule"),
        (lambda: actions.EarlyStoppingAction("loss", 0), ValueError, "patience must be a positive int, got 0"),
        (lambda: actions.EarlyStoppingAction("loss", 1, "best"), ValueError, "'auto', 'min' or 'max', got 'best'"),
        (lambda: actions.EarlyStoppingAction("loss", 1, min_delta=-1), ValueError, "not negative, got -1"),
        (lambda: actions.ProgressAction(bar="keras"), ValueError, "'plain', got 'keras'. Write bar='tqdm' for a bar"),
        (lambda: actions.ProgressAction(total_steps=0), ValueError, "must be a positive int or None, got 0"),
        (lambda: actions.ProfileAction("traces", first_step=1), ValueError, "because step 1 compiles, got 1"),
        (lambda: actions.ProfileAction("traces", num_steps=0), ValueError, "num_steps must be a positive int, got 0"),
    ],
)
def test_invalid_arguments_raise(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_saves_come_last_whatever_their_category_in_the_time_report(tmp_path):
    calls = []

    class Save(jaxloop.CheckpointAction):
        time_category = "actions"

        def __call__(self, state, outputs, **kwargs):
            calls.append("save")

    other = Do(lambda **_: calls.append("last"), runs_last=True, time_category="checkpoints")
    jaxloop.TrainLoop(STEP, end_actions=[Save(tmp_path), other])(STATE, BATCHES, 3)
    assert calls == ["last", "save"]
