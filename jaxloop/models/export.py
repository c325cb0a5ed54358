"""Exports a model and its parameters to a file that can be used without jaxloop."""

from collections.abc import Sequence

import jax
from etils import epath
from jax import export as jax_export

from jaxloop import types
from jaxloop.base import checks, files
from jaxloop.metrics import fetch
from jaxloop.step import Step, forward


def export(
    step: Step,
    state: types.TrainState,
    spec: types.BatchSpec,
    path: epath.PathLike,
    *,
    batch_size: int | None = None,
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> None:
    """Exports a step's model and its parameters, in evaluation mode, to a file.

    The file contains a StableHLO program from `jax.export`. Loading and running it requires JAX, but not jaxloop or the
    model's code. JAX guarantees that versions released in the following six months can read the file.

    >>> import jax, optax, tempfile, jaxloop
    >>> from flax import linen as nn
    >>> step = jaxloop.LossStep(jax.random.key(0), nn.Dense(2), loss=lambda outputs, batch: outputs)
    >>> path = tempfile.mkdtemp() + "/model.jaxexport"
    >>> export(step, step.initialize_model([1, 3]), [1, 3], path)

    In another process:

    >>> import numpy as np
    >>> from jax import export as jax_export
    >>> with open(path, "rb") as file:
    ...     model = jax_export.deserialize(bytearray(file.read()))
    >>> model.call(np.ones([5, 3], np.float32)).shape
    (5, 2)

    Args:
      step: The step whose model is exported.
      state: The state that contains the parameters. It is not donated. Its arrays are copied to the host and become
        constants in the program.
      spec: The spec of the model's inputs, in the form accepted by `initialize_model`. The size of each leading axis is
        replaced by `batch_size`. A list or a dict of inputs is passed to the exported function as one argument.
      path: The file to write. An existing file is replaced.
      batch_size: The number of examples per call. If None, the program accepts any number, and the model
        must support every batch size.
      platforms: The platforms on which the program can run.

    Raises:
      ValueError: If `batch_size` is None and the model doesn't support every batch size.
      NotImplementedError: If called in a multi-process job.
      OSError: If the file can't be written.
    """
    checks.check_only_process("jaxloop.export")
    constants = fetch(state)
    params = step.params_to_evaluate(constants)
    size = jax_export.symbolic_shape("batch")[0] if batch_size is None else batch_size
    shape = lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]) if leaf.shape else (), leaf.dtype)
    inputs = jax.tree.map(shape, jax.eval_shape(lambda: forward.example_inputs(spec)))
    # The state is not an argument, because the process that loads the file would then need the state's class.
    predict = lambda inputs: step.call_model(constants, params, inputs, train=False)[0]
    try:
        exported = jax_export.export(jax.jit(predict), platforms=tuple(platforms))(inputs)
    except Exception as error:
        if batch_size is None:
            error.add_note("The model may not support every batch size. Give jaxloop.export(..., batch_size=...).")
        raise
    files.write_atomically(files.absolute(path), exported.serialize())
