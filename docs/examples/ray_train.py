"""Trains in two Ray workers: `python docs/examples/ray_train.py runs/1`, after `pip install "ray[train]"`.

If a worker fails, Ray restarts both, and the run resumes from its newest checkpoint.
"""

import os
import socket
import sys

import jax
import numpy as np
import optax
import ray
from flax import linen as nn
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import jaxloop
from jaxloop import data, distributed
from jaxloop.partition import create_mesh


def make_batch(number):
    x = np.random.default_rng(number).normal(size=[32, 8]).astype(np.float32)
    return {"x": x, "y": x.sum(axis=-1, keepdims=True)}


def loss(outputs, batch):
    return ((outputs - batch["y"]) ** 2).mean(axis=-1)


def train_func(config):
    with socket.socket() as probe:
        probe.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
    worker = train.get_context()
    distributed.initialize(broadcast_from_rank_zero(address), worker.get_world_size(), worker.get_world_rank())

    partitioner = jaxloop.FSDPPartitioner(create_mesh(data=-1))
    step = jaxloop.LossStep(jax.random.key(0), nn.Dense(1), optax.adam(1e-2), partitioner, train=True, loss=loss)
    checkpoints = config["workdir"] + "/checkpoints"
    outer_loop = jaxloop.OuterLoop(
        jaxloop.TrainLoop(step, end_actions=[jaxloop.ProgressAction(), jaxloop.CheckpointAction(checkpoints)]),
        checkpoint_spec=jaxloop.CheckpointSpec(checkpoints),
    )
    outer_loop(
        step.initialize_model([1, 8]),
        data.shard_for_process(data.from_index(make_batch)),
        train_total_steps=200,
        train_loop_steps=100,
    )


if __name__ == "__main__":
    workdir = os.path.abspath(sys.argv[1])
    trainer = DataParallelTrainer(
        train_func,
        train_loop_config={"workdir": workdir},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(storage_path=workdir, failure_config=train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
