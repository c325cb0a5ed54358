"""The functional API: a loop that calls callbacks when their schedules fire.

>>> import jax
>>> import jax.numpy as jnp
>>> import numpy as np
>>> from jaxloop import functional as jf
>>> @jax.jit
... def train_step(weight, batch):
...     slope = jnp.mean((weight * batch["x"] - batch["y"]) * batch["x"])
...     logs = jf.logs()
...     logs.add_metric("slope", slope)
...     return logs, weight - 0.1 * slope
>>> dataset = [{"x": np.full(8, 2.0, np.float32), "y": np.full(8, 6.0, np.float32)}] * 100
>>> def show(weight, batch, elapsed):
...     print(f"step {elapsed.steps}: {weight:.4f}")
>>> weight, history, elapsed = jf.loop(
...     jnp.float32(0), dataset, {jf.every(1): train_step, jf.every(10): show}, stop=jf.at(30)
... )
step 10: 2.9819
step 20: 2.9999
step 30: 3.0000
>>> elapsed.steps, len(history.collect("slope"))
(30, 30)

The state may be any pytree. `Elapsed`, schedules, `History`, actions, checkpoints and partitioners are the same as in
the other APIs.

- `loop` calls the callbacks. In a hand-written loop, use `elapse` to count steps, and call the same callbacks yourself.
- `logs()` creates an empty `Logs` for a step's values. `history()` creates an empty `History` for a run's metrics.
- `step` and `train_step` turn pure functions into compiled and sharded callbacks.
- `checkpoint`, `early_stopping`, `keras_bar` and `inner_loop` return callbacks.
"""

from jaxloop.functional.callbacks import Callback, LoopState, Tasks
from jaxloop.functional.counting import elapse
from jaxloop.functional.log_entries import Logs
from jaxloop.functional.running import loop
from jaxloop.functional.tools import checkpoint, early_stopping, inner_loop, keras_bar, step, train_step
from jaxloop.history import History
from jaxloop.schedules import Elapsed, after, always, at, every, first, last, never

logs: type[Logs] = Logs
history: type[History] = History

__all__ = [
    "Callback",
    "Elapsed",
    "Logs",
    "LoopState",
    "Tasks",
    "after",
    "always",
    "at",
    "checkpoint",
    "early_stopping",
    "elapse",
    "every",
    "first",
    "history",
    "inner_loop",
    "keras_bar",
    "last",
    "logs",
    "loop",
    "never",
    "step",
    "train_step",
]
