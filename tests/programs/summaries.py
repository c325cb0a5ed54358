"""A run that writes many kinds of points for TensorBoard, and can kill itself."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np

import jaxloop
from jaxloop import actions, checkpoint, every, examples, functional

NUM_STEPS, SAVED_AT, KILLED_AT = 40, 20, 27


class Kill(actions.Action):
    """Kills the process after a given step, or once a checkpoint is on disk, with or without flushing first."""

    def __init__(self, directory, summaries, when):
        super().__init__(every(steps=1))
        self._directory, self._summaries, self._when = directory, summaries, when

    def __call__(self, state, outputs, *, step_num, **kwargs):
        if self._when.startswith("step "):
            if step_num == int(self._when.removeprefix("step ")):
                os.kill(os.getpid(), signal.SIGKILL)
            return
        if self._when == "never" or step_num < KILLED_AT:
            return
        while SAVED_AT not in checkpoint.all_steps(self._directory):
            time.sleep(0.01)
        if self._when == "flushed":
            self._summaries.flush()
        os.kill(os.getpid(), signal.SIGKILL)


class Summarize(actions.SummaryAction):
    """Writes what a function makes for the number of a step."""

    def __init__(self, writer, interval, make):
        super().__init__(writer, interval, prefix="more/")
        self._make = make

    def __call__(self, state, outputs, *, step_num, **kwargs):
        super().__call__(state, self._make(step_num), step_num=step_num)


def pictures(step_num):
    return {"image": np.full([1, 2, 2, 1], step_num / 100), "histogram": np.arange(3.0)}


def run(directory, make_writer=jaxloop.default_writer, *, api="objects", kill="never"):
    """Runs or resumes; `kill` is "never", "at_once", "flushed" or, for example, "step 13"."""
    directory = pathlib.Path(directory)
    step, state, batches = examples.tiny_regression()
    data, checkpoints = jaxloop.from_index(lambda index: batches[index % 100]), directory / "checkpoints"
    writer = make_writer(directory / "events")
    each = actions.SummaryAction(writer, every(steps=1), prefix="each/")
    ends = [each, Kill(checkpoints, each, kill)]
    if api == "functions":
        tasks = {every(1): [step, *ends], every(steps=10): functional.checkpoint(checkpoints, resume=True)}
        functional.loop(state, data, tasks, stop=NUM_STEPS)
    else:
        # Step 20 ends a loop. There, these write after the checkpoint is saved.
        ends = [actions.SummaryAction(writer, prefix="loop/"), Summarize(writer, every(steps=5), pictures), *ends]
        train_loop = jaxloop.TrainLoop(
            step, end_actions=[actions.CheckpointAction(checkpoints, every(steps=10)), *ends]
        )
        eval_loop = jaxloop.EvalLoop(step, end_actions=[actions.SummaryAction(writer, prefix="eval/")])
        outer_loop = jaxloop.OuterLoop(train_loop, [eval_loop], jaxloop.CheckpointSpec(checkpoints))
        outer_loop(state, data, NUM_STEPS, 10, [jaxloop.EvalSpec(batches[:2], eval_loop_interval=1)])
    writer.close()


# Reads directories like TensorBoard, in a process without TensorFlow. Leaves out jaxloop's times, which vary.
READ = """
import json, sys
sys.modules["tensorflow"] = None
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.util import tensor_util
def points(directory):
    events = plugin_event_accumulator.EventAccumulator(directory, size_guidance={"tensors": 0})
    events.Reload()
    read = lambda tag: [(each.step, str(tensor_util.make_ndarray(each.tensor_proto))) for each in events.Tensors(tag)]
    return {tag: read(tag) for tag in events.Tags()["tensors"] if "jaxloop/" not in tag}
print(json.dumps([points(directory) for directory in sys.argv[1:]]))
"""


def points_in(*directories):
    command = [sys.executable, "-W", "ignore", "-c", READ, *map(str, directories)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def kill_and_resume(directory, api, steps):
    """Kills a run at each of these steps, then lets it finish; returns the points that TensorBoard shows."""
    command = [sys.executable, __file__, str(directory), api]
    for kill in [*(f"step {step}" for step in steps), "never"]:
        run = subprocess.run([*command, kill], capture_output=True, text=True)
        if run.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(run.stderr)
    return points_in(directory / "events")[0]


if __name__ == "__main__":
    run(sys.argv[1], api=sys.argv[2], kill=sys.argv[3])
