"""A run that writes to a tracker. It is killed at random moments, and restarted until it finishes."""

import importlib
import json
import os
import pathlib
import random
import signal
import struct
import sys
import time
import traceback

sys.path.append(str(pathlib.Path(__file__).parents[1]))  # Where the other programs are.

from programs.acts import Do
from programs.summaries import Summarize

import jaxloop
from jaxloop import actions, every, examples

# These let some evaluations coincide with a checkpoint, and let some kills precede the first checkpoint.
NUM_STEPS, SAVE, EVAL, PACE_SECS = 40, 7, 14, 0.02


def media(step_num):
    text = jaxloop.MetricWithMetadata(f"step {step_num}", jaxloop.MetricType.TEXT)
    image = jaxloop.MetricWithMetadata([[[[step_num / 100]] * 2] * 2], jaxloop.MetricType.IMAGE)
    return {"text": text, "image": image}


def run(directory, tracker):
    """Runs or resumes."""
    step, state, batches = examples.tiny_regression()
    writer = WRITERS[tracker](directory)
    writer.write_hparams({"lr": 0.1})
    each = actions.SummaryAction(writer, every(steps=1), prefix="train/")
    saving = actions.CheckpointAction(directory / "checkpoints", every(steps=SAVE), keep=2)
    pause = Do(lambda **_: time.sleep(PACE_SECS), every(steps=1))
    summarize = Summarize(writer, every(steps=10), media)
    train_loop = jaxloop.TrainLoop(step, end_actions=[each, summarize, pause, saving])
    eval_loop = jaxloop.EvalLoop(
        examples.tiny_regression(train=False)[0], end_actions=[actions.SummaryAction(writer, prefix="eval/")]
    )
    saved = jaxloop.CheckpointSpec(directory / "checkpoints")
    outer_loop = jaxloop.OuterLoop(
        train_loop, [eval_loop], saved, workdir=directory, log_interval=every(steps=1), notes={"seed": 3}
    )
    data = jaxloop.from_index(lambda index: batches[index % 100])
    outer_loop(state, data, NUM_STEPS, eval_specs=[jaxloop.EvalSpec(batches[:2], interval=every(steps=EVAL))])
    writer.close()


def expected(directory):
    """Returns the points that a tracker must show: those of the history, and the media."""
    history = jaxloop.History.load(directory / "history.jsonl")
    points = {}
    for name in ("train.loss", "eval.loss"):
        steps, values = history.collect("steps", name)
        points[name.replace(".", "/")] = [[step, value] for step, value in zip(steps, values, strict=True)]
    media = [[step, None] for step in range(10, NUM_STEPS + 1, 10)]
    return points | {"more/text": media, "more/image": media}


# The trackers. Each `*_points` function returns the points by name, and the number of tracked runs. -----------------


def mlflow_points(directory):
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{directory}/mlflow.db")
    found = client.search_runs([client.get_experiment_by_name("here").experiment_id])
    points = {}
    for run in found:
        assert run.data.params == {"lr": "0.1"} and run.data.tags["seed"] == "3"
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            points.setdefault(name, []).extend([each.step, each.value] for each in history)
        for name in ("more/text", "more/image"):
            paths = [each.path for each in client.list_artifacts(run.info.run_id, name)]
            points[name] = [[int(path.split("/")[-1][:9]), None] for path in paths]
    return points, len(found)


def mlflow_writer(directory):
    client = importlib.import_module("mlflow").MlflowClient(f"sqlite:///{directory}/mlflow.db")
    if client.get_experiment_by_name("here") is None:  # Keeps the artifacts in this directory.
        client.create_experiment("here", f"file://{directory}/artifacts")
    return actions.MlflowWriter(directory, f"sqlite:///{directory}/mlflow.db", "here")


def trackio_points(directory):
    storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
    project, points = directory.name, {}
    runs = storage.get_run_records(project)
    for run in runs:
        config = storage.get_run_config(project, run["name"], run_id=run["id"])
        assert (config["lr"], config["seed"]) == (0.1, 3)
        for row in storage.get_logs(project, run["name"], run_id=run["id"]):
            for name in row.keys() - {"step", "timestamp"}:
                value = None if name.startswith("more/") else row[name]
                points.setdefault(name, []).append([row["step"], value])
    return points, len(runs)


def wandb_points(directory):
    """Returns the points that `wandb sync` would upload."""
    records, points, ids = importlib.import_module("wandb.proto.wandb_internal_pb2"), {}, set()
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        ids.add(path.stem)
        for record in map(records.Record.FromString, records_in(path.read_bytes())):
            items = record.history.item
            # Media have nested keys.
            row = {"/".join(item.nested_key[:1]) or item.key: item.value_json for item in items}
            for name, value in row.items():
                value = None if name.startswith("more/") else json.loads(value)
                points.setdefault(name, []).append([int(row.get("jaxloop/step", -1)), value])
    return points, len(ids)


def records_in(data, block=32768):
    """Yields the records of a file in LevelDB's log format, which follow a header of 7 bytes."""
    record, place = b"", 7
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0:
            return
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


WRITERS = {
    "mlflow": mlflow_writer,
    "trackio": lambda directory: actions.TrackioWriter(directory, directory.name),
    "wandb": lambda directory: actions.WandbWriter(directory, mode="offline"),
}
POINTS = {"mlflow": mlflow_points, "trackio": trackio_points, "wandb": wandb_points}


def problems(directory, tracker):
    """Returns the differences between the tracker and the history."""
    shown, number = POINTS[tracker](directory)
    shown = {name: sorted(points) for name, points in shown.items() if "jaxloop/" not in name and name[0] != "_"}
    wanted = expected(directory)
    found = [f"{name}: {shown.get(name)}" for name in {**shown, **wanted} if shown.get(name) != wanted.get(name)]
    return found + ([f"{number} tracked runs"] if number != 1 else [])


# The kills --------------------------------------------------------------------------------------------------------


def start(directory, tracker):
    """Forks a process that runs or resumes; returns its ID."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run(directory, tracker)
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    return pid


def num_rows(directory):
    rows = directory / "history.jsonl"
    return rows.read_bytes().count(b"\n") if rows.exists() else 0


def kill_and_resume(directory, tracker, kills, seed):
    """Kills a run at random moments, then lets it finish; returns the number of kills, and the tracker's problems."""
    directory.mkdir(parents=True)
    rng, killed, was_killed = random.Random(seed), 0, True
    while was_killed:
        begins, pid = time.monotonic(), start(directory, tracker)
        if killed < kills:
            if rng.random() < 0.7:  # Usually wait for some steps, because most things happen there.
                number = num_rows(directory) + rng.choice([1, SAVE + 1])
                while num_rows(directory) < number and time.monotonic() < begins + 60:
                    if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                        break
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, SAVE * PACE_SECS))
            else:
                time.sleep(rng.uniform(0, 3))
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        was_killed = code == -signal.SIGKILL
        killed += was_killed
        if code not in (0, -signal.SIGKILL):
            return killed, [f"it ended with {code}"]
    return killed, problems(directory, tracker)


def main(directory, tracker, kills, seed):
    """Kills runs, one after the other, until the number of kills is reached; returns the problems."""
    os.environ["TRACKIO_DIR"] = str(directory / "trackio")  # Read when trackio is imported.
    # Imported before forking, so that the children don't have to.
    for name in ("orbax.checkpoint", *{"mlflow": ["mlflow"], "trackio": ["trackio"]}.get(tracker, [])):
        importlib.import_module(name)
    done, number, found = 0, 0, []
    while done < kills:
        killed, differ = kill_and_resume(directory / f"{tracker}_{number}", tracker, kills - done, seed + number)
        found += [f"{tracker}, run {number}, killed {killed} times: {each}" for each in differ]
        done, number = done + killed, number + 1
    return {"kills": done, "runs": number, "problems": found}


if __name__ == "__main__":
    result = main(pathlib.Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    print(json.dumps(result))
