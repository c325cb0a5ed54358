import json
import subprocess
import sys

import jax
import jax.numpy as jnp

import jaxloop
from jaxloop import examples
from jaxloop.actions import ProfileAction
from jaxloop.schedules import Elapsed


def run(action, num_steps, first_step=1):
    """Calls the action at each step at which it is due, and returns these steps and the state."""
    double = jax.jit(lambda x: 2 * x)
    state, called = jnp.ones(3), []
    for step in range(first_step, num_steps + 1):
        state = double(state)
        if action.interval(Elapsed(step)):
            called.append(step)
            action(state, None, step_num=step, elapsed=Elapsed(step))
    return called, state


def traces(directory):
    return sorted(directory.glob("plugins/profile/*/*.xplane.pb"))


def test_writes_a_trace_of_the_given_steps(tmp_path, logs):
    action = ProfileAction(tmp_path, first_step=3, num_steps=2)
    called, _ = run(action, 10)
    assert called == [2, 4]
    assert len(traces(tmp_path)) == 1
    assert logs.messages == [f"The profile of steps 3 to 4 is in {tmp_path}. View it with tensorboard --logdir."]
    action.close()
    assert len(logs.messages) == 1
    assert not ProfileAction.uses_outputs


def test_a_run_that_ends_during_the_profile_writes_a_trace(tmp_path, logs):
    action = ProfileAction(tmp_path, first_step=3, num_steps=20)
    run(action, 8)
    action.close()
    assert len(traces(tmp_path)) == 1
    assert logs.messages[0].startswith("The profile of the steps from 3 on is in")
    jax.profiler.start_trace(str(tmp_path))  # No other trace is running.
    jax.profiler.stop_trace()


def test_warns_if_another_trace_is_running(tmp_path, warnings_logged):
    jax.profiler.start_trace(str(tmp_path))
    run(ProfileAction(tmp_path, first_step=3, num_steps=2), 10)
    jax.profiler.stop_trace()
    (warning,) = warnings_logged()
    assert "could not profile step 3: Profile has already been started" in warning


READ = """
import json, sys
import jax

profile, names, numbers = jax.profiler.ProfileData.from_file(sys.argv[1]), [], []
for plane in profile.planes:
    for line in plane.lines:
        for event in line.events:
            names.append(event.name)
            if event.name == "train":
                numbers += [value for name, value in event.stats if name == "step_num"]
print(json.dumps([names, numbers]))
"""


def test_traces_mark_steps_and_name_phases(tmp_path, monkeypatch):
    step, state, batches = examples.tiny_regression()
    monkeypatch.setattr(type(step), "preprocess_batch", lambda self, batch: batch)
    profile = ProfileAction(tmp_path, first_step=11, num_steps=4)
    loop = jaxloop.TrainLoop(step, end_actions=[profile], steps_per_dispatch=2)
    eval_step, _, _ = examples.tiny_regression(train=False)
    outer_loop = jaxloop.OuterLoop(loop, [jaxloop.EvalLoop(eval_step)])
    outer_loop(state, batches, 20, eval_specs=[jaxloop.EvalSpec(batches[:2], interval=jaxloop.every(steps=12))])
    (file,) = traces(tmp_path)
    # In a separate process, because JAX's reader may abort.
    read = subprocess.run([sys.executable, "-c", READ, file], capture_output=True, text=True, check=True)
    names, numbers = json.loads(read.stdout)
    assert numbers == [12, 14]
    assert names.count("eval") == 2 and "jaxloop: in evaluations" in names
    assert "jaxloop: waiting for data" in names and "jaxloop: preprocess_batch" in names
