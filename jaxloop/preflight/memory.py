"""The memory: what the state and a compiled train step take of a device."""

import os
from typing import Any

import jax

from jaxloop import partition, types
from jaxloop.action_loop import ActionLoop
from jaxloop.cost import Cost
from jaxloop.layout import readable
from jaxloop.preflight.experiment import TRAIN
from jaxloop.preflight.findings import Findings
from jaxloop.preflight.state import State
from jaxloop.preflight.step import state_for_begin
from jaxloop.step import Step


def look_at_layout(step: Step, state: Any, found: Findings) -> None:
    """Says what a state takes."""
    with found.finding(TRAIN):
        layout = step.partitioner.report(state)
        parts = {"parameters": "params", "optimizer": "opt_state"}
        sizes = {
            name: sum(leaf.bytes_per_device for leaf in layout.leaves if leaf.path.split("/")[0] == field)
            for name, field in parts.items()
        }
        shown = ", ".join(f"{name} {readable(size)}" for name, size in sizes.items() if size)
        found.plan["state"] = f"{readable(layout.bytes_per_device)} per device" + (f": {shown}" if shown else "")


def look_at_compiled(loop: ActionLoop, state: State, batch: types.Batch, found: Findings) -> None:
    """Compiles the train step, and says what it takes."""
    with found.finding(TRAIN):
        loop.compile(state_for_begin(state, loop.step), batch)
        cost = loop.step.cost_analysis()
        memory = partition.memory_of(jax.local_devices()[0])
        flops = "" if cost.flops is None else f"{cost.flops:.3g} FLOPs; "
        there = "" if memory is None else f" of {readable(memory)}"
        found.plan["step"] = (
            f"{flops}{readable(cost.peak_bytes)}{there} per device, of which {readable(cost.temp_bytes)} for "
            "activations and gradients"
        )
        _look_at_room(cost, memory, found)


def _look_at_room(cost: Cost, memory: int | None, found: Findings) -> None:
    """Says where a step takes more than there is."""
    if memory is not None and cost.peak_bytes > memory:
        found.add(
            TRAIN,
            f"A step takes {readable(cost.peak_bytes)} of a device, which has {readable(memory)}. Split the state over "
            "more devices (FSDPPartitioner), make the batch smaller, accumulate gradients, or compute activations "
            "again in the backward pass (jax.checkpoint).",
        )
    needed, there = cost.peak_bytes * len(jax.local_devices()), _bytes_of_host()
    if jax.default_backend() == "cpu" and there is not None and needed > there:
        text = f"A step takes {readable(needed)}, and this host has {readable(there)} of memory."
        found.warn(TRAIN, f"{text} Take a smaller batch, or another host.")


def _bytes_of_host() -> int | None:
    """The memory of this host; None where the system doesn't say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
