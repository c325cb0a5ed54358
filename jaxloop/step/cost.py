"""The FLOPs and memory of compiled steps."""

import dataclasses
import math
import re
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from jaxloop.partition.layout import readable


@final
@dataclasses.dataclass(frozen=True)
class Cost:
    """The FLOPs and the memory that one dispatch of a compiled step requires.

    The memory sizes are in bytes per device, and come from the program that XLA compiled. `str(...)` formats the FLOPs
    and the memory as a sentence.

    Attributes:
      flops: The total number of floating-point operations on all devices; see `flops_of`.
      argument_bytes: The memory for the state and the batch.
      output_bytes: The memory for the new state and the outputs.
      alias_bytes: The part of `output_bytes` that reuses the memory of donated arguments.
      temp_bytes: The memory for temporaries, such as activations and gradients.
      code_bytes: The memory for the program itself.

    >>> print(Cost(flops=6.2e9, argument_bytes=24 << 20, output_bytes=24 << 20, alias_bytes=24 << 20,
    ...            temp_bytes=100 << 20, code_bytes=0))
    6.2e+09 FLOPs and 124.0 MiB of a device's memory: 24.0 MiB of arguments, 100.0 MiB of temporaries.
    """

    flops: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak memory that the program needs on each device, in bytes."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    def __str__(self) -> str:
        return (
            f"{self.flops:.3g} FLOPs and {readable(self.peak_bytes)} of a device's memory: "
            f"{readable(self.argument_bytes)} of arguments, {readable(self.temp_bytes)} of temporaries."
        )


class DeviceMemoryError(MemoryError):
    """Raised if a program needs more memory than its devices have.

    Attributes:
      needed_bytes: The memory that the program needs according to the compiler, in bytes per device.
      available_bytes: The available memory, in bytes per device.
    """

    def __init__(self, needed_bytes: int, available_bytes: int):
        super().__init__(
            f"The program needs {readable(needed_bytes)} of a device's memory, and {readable(available_bytes)} are "
            "available."
        )
        self.needed_bytes: int = needed_bytes
        self.available_bytes: int = available_bytes


# "the total memory required for HLO temporaries (32.03G) exceeds available HBM (15.75G)".
_TOO_LARGE = re.compile(r"required for [^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a lowered program.

    Raises:
      DeviceMemoryError: If the program needs too much memory. Only the TPU compiler detects this.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if found := _TOO_LARGE.search(str(error)):
            needed, needed_unit, available, available_unit = found.groups()
            bytes_of = lambda number, unit: int(float(number) * 1024 ** " KMGT".index(unit or " "))
            raise DeviceMemoryError(bytes_of(needed, needed_unit), bytes_of(available, available_unit)) from error
        raise


def cost_of(traced: jax.stages.Traced) -> Cost:
    """Compiles a traced program and returns its cost.

    Raises:
      DeviceMemoryError: If the program needs too much memory. Only the TPU compiler detects this.
    """
    memory: Any = compiled(traced.lower()).memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    argument, output, alias, temp, code = (int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in names)
    return Cost(flops_of(traced.jaxpr), argument, output, alias, temp, code)


# Each of these takes one operation per element.
_ARITHMETIC = frozenset(
    """abs acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp cos cosh cumlogsumexp cummax cummin cumprod
    cumsum digamma div erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p logistic max min mul neg pow
    reduce_max reduce_min reduce_prod reduce_sum reduce_window_sum rem rsqrt scatter-add scatter_add sin sinh sqrt
    square sub tan tanh""".split()
)


def flops_of(program: Any) -> float:
    """Returns the number of floating-point operations in a traced program (a `ClosedJaxpr`), summed over all devices.

    A multiply-add in a matrix product or convolution counts as two operations; any other floating-point operation
    counts as one per element. A scan's body counts once per iteration. (XLA's own estimate counts the body only
    once, and therefore misses most of a model that scans over its layers.) The body of a `while` loop counts once,
    because the number of iterations is unknown. Only the most expensive branch of a `cond` counts. Kernels that JAX
    can't inspect, such as cuDNN's, aren't counted. If a program has no floating-point operations, its integer
    operations are counted instead.

    >>> scanned = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, length=10)[0]
    >>> flops_of(jax.make_jaxpr(scanned)(jnp.zeros([4, 4]))) == 10 * 2 * 4**3
    True
    """
    return _operations(program, np.inexact) or _operations(program, np.integer)


def _operations(program: Any, kind: Any) -> float:
    """Returns the number of operations in a program. Matrix products and convolutions are always counted.

    Elementwise operations and reductions are counted only if their results have a dtype of the given kind.
    """
    return sum((_operations_of(equation, kind) for equation in program.eqns), 0.0)


def _operations_of(equation: Any, kind: Any) -> float:
    name, params, inputs = equation.primitive.name, equation.params, [each.aval for each in equation.invars]
    result: Any = equation.outvars[0].aval if equation.outvars else None
    if name in _ARITHMETIC:
        is_counted = jnp.issubdtype(result.dtype, kind)
        return float(max(array.size for array in (result, *inputs))) if is_counted else 0.0
    match name:
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            return 2.0 * result.size * math.prod(inputs[0].shape[axis] for axis in contracted)
        case "ragged_dot" | "ragged_dot_general":
            return 2.0 * inputs[0].size * result.shape[-1]
        case "conv_general_dilated":
            return _flops_of_convolution(inputs[0], inputs[1], result, **params)
    bodies = [_operations(each, kind) for each in jax.tree.leaves(params) if hasattr(each, "eqns")]
    match name:
        case "cond":
            return max(bodies)
        case "scan":
            return params["length"] * sum(bodies)
        case "shard_map":  # Its body is the program of one device.
            axes = params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"]
            return math.prod(params["mesh"].shape[axis] for axis in axes) * sum(bodies)
        case "pallas_call":  # Its body is the program of one block.
            return math.prod(params["grid_mapping"].grid) * sum(bodies)
    return sum(bodies)


def _flops_of_convolution(
    lhs: Any, rhs: Any, out: Any, *, dimension_numbers: Any, window_strides: Any, padding: Any, **options: Any
) -> float:
    """Returns the number of operations in a convolution: two per product of an input element and a kernel element.

    Products with the zeros that padding and dilation insert are not counted.
    """
    (_, _, *of_lhs), (_, inputs, *of_rhs), (rows, outputs, *of_out) = dimension_numbers
    num_products = out.shape[rows] * out.shape[outputs] * rhs.shape[inputs]
    for axis, (stride, (low, _)) in enumerate(zip(window_strides, padding, strict=True)):
        every, step = options["lhs_dilation"][axis], options["rhs_dilation"][axis]
        place = np.arange(out.shape[of_out[axis]])[:, None] * stride + np.arange(rhs.shape[of_rhs[axis]]) * step - low
        num_products *= int(((place >= 0) & (place < lhs.shape[of_lhs[axis]] * every) & (place % every == 0)).sum())
    return 2.0 * num_products
