"""What a compiled step costs: operations and memory; and what a device could do at most."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one dispatch of a compiled step costs, as XLA says. As a text, one sentence.

    Attributes:
      flops: floating-point operations of the whole step, over all devices, as XLA counts them before it optimizes;
        None if it doesn't say. It counts the body of a loop once.
      argument_bytes: of one device's memory, for the state and the batch.
      output_bytes: for the new state and the outputs.
      alias_bytes: of these, what takes the place of arguments, because they are donated.
      temp_bytes: for what comes in between: activations, gradients.
      code_bytes: for the program.

    >>> print(Cost(flops=6.2e9, argument_bytes=24 << 20, output_bytes=24 << 20, alias_bytes=24 << 20,
    ...            temp_bytes=100 << 20, code_bytes=0))
    6.2e+09 FLOPs and 124.0 MiB of a device's memory: 24.0 MiB of arguments, 100.0 MiB in between.
    """

    flops: float | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most memory of one device that is in use at a time, as far as XLA plans it."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    def __str__(self) -> str:
        mebibytes = lambda number: f"{number / 2**20:,.1f} MiB"
        flops = "FLOPs that XLA does not count" if self.flops is None else f"{self.flops:.3g} FLOPs"
        return (
            f"{flops} and {mebibytes(self.peak_bytes)} of a device's memory: {mebibytes(self.argument_bytes)} of "
            f"arguments, {mebibytes(self.temp_bytes)} in between."
        )


def cost_of(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled) -> Cost:
    """What a program costs."""
    memory: Any = compiled.memory_analysis()
    size = lambda name: int(getattr(memory, f"{name}_size_in_bytes", 0))
    return Cost(
        flops_of(lowered), size("argument"), size("output"), size("alias"), size("temp"), size("generated_code")
    )


def flops_of(lowered: jax.stages.Lowered) -> float | None:
    """The floating-point operations of a program over all devices; None if XLA doesn't say."""
    costs: Any = lowered.cost_analysis()
    return (costs or {}).get("flops")


# Dense bfloat16 (float16 before Ampere), without sparsity, from the data sheets of NVIDIA and from "Cloud TPU system
# architecture". A JAX device of TPU v2 and v3 is a core, half a chip. More particular names come first.
_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
    "TPU v3": 61.5e12,
    "TPU v2": 22.5e12,
}


def peak_flops_per_sec(device_kind: str) -> float | None:
    """What a device of a kind could do at most, in bfloat16 matrix products; None where that is not known here.

    >>> peak_flops_per_sec("NVIDIA H100 80GB HBM3"), peak_flops_per_sec("cpu")
    (989000000000000.0, None)
    """
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)
