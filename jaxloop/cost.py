"""The cost of a compiled step in FLOPs, memory and communication, and the peak FLOPs of devices."""

import collections
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, final

import jax

from jaxloop.layout import readable


@final
@dataclasses.dataclass(frozen=True)
class Collective:
    """All collective operations of one kind in a dispatch.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
      count: The number of operations. An operation in a loop counts once per iteration if XLA knows the number of
        iterations.
      bytes: The total size of their inputs or outputs, whichever is larger, in bytes per device.
    """

    kind: str
    count: int
    bytes: int


@final
@dataclasses.dataclass(frozen=True)
class Cost:
    """XLA's estimate of the cost of one dispatch of a compiled step. `str` formats it as one sentence.

    Attributes:
      flops: The number of floating-point operations in the whole step, on all devices together; None if XLA doesn't
        count them. XLA counts them before optimization or, for a topology, after it. The body of a loop counts once.
      argument_bytes: The memory for the state and the batch. This and all sizes below are in bytes per device.
      output_bytes: The memory for the new state and the outputs.
      alias_bytes: The part of `output_bytes` that reuses donated arguments.
      temp_bytes: The memory for temporaries, such as activations and gradients.
      code_bytes: The memory for the program itself.
      collectives: The collective operations, by kind. Empty on one device.

    >>> print(Cost(flops=6.2e9, argument_bytes=24 << 20, output_bytes=24 << 20, alias_bytes=24 << 20,
    ...            temp_bytes=100 << 20, code_bytes=0))
    6.2e+09 FLOPs and 124.0 MiB of a device's memory: 24.0 MiB of arguments, 100.0 MiB of temporaries.
    """

    flops: float | None
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    collectives: Sequence[Collective] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak memory use per device, in bytes, as planned by XLA."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes

    def __str__(self) -> str:
        flops = "An unknown number of FLOPs" if self.flops is None else f"{self.flops:.3g} FLOPs"
        return (
            f"{flops} and {readable(self.peak_bytes)} of a device's memory: {readable(self.argument_bytes)} of "
            f"arguments, {readable(self.temp_bytes)} of temporaries."
        )


class DeviceMemoryError(MemoryError):
    """Raised if a program needs more memory than its devices have.

    Attributes:
      needed_bytes: The memory that the program and its arguments need, in bytes per device.
      available_bytes: The memory that is available, in bytes per device.
    """

    def __init__(self, needed_bytes: int, available_bytes: int):
        super().__init__(
            f"The program needs {readable(needed_bytes)} of a device's memory, and {readable(available_bytes)} are "
            "available."
        )
        self.needed_bytes: int = needed_bytes
        self.available_bytes: int = available_bytes


# "the total memory required for HLO temporaries (32.03G) exceeds available HBM (15.75G)", and older forms of it.
_TOO_LARGE = re.compile(
    r"required for [^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)|"
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program.

    Raises:
      DeviceMemoryError: The program needs too much memory. Only the compiler for TPUs detects this.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if found := _TOO_LARGE.search(str(error)):
            needed, needed_unit, available, available_unit = [each for each in found.groups() if each is not None]
            bytes_of = lambda number, unit: int(float(number) * 1024 ** " KMGT".index(unit or " "))
            raise DeviceMemoryError(bytes_of(needed, needed_unit), bytes_of(available, available_unit)) from error
        raise


def cost_of(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, *, num_devices: int) -> Cost:
    """Returns the cost of a compiled program."""
    memory: Any = compiled.memory_analysis()
    names = ("argument", "output", "alias", "temp", "generated_code")
    sizes = [int(getattr(memory, f"{name}_size_in_bytes", 0)) for name in names]
    argument, output, alias, temp, code = sizes
    collectives = (
        collectives_of(compiled.as_text() or "") if num_devices > 1 else ()
    )  # The text is long, so it is read only if needed.
    flops = flops_of(lowered)
    if flops is None:  # For devices of a topology, XLA counts the optimized program of one device.
        flops = _flops_in(compiled.cost_analysis())
        flops = None if flops is None else flops * num_devices
    return Cost(flops, argument, output, alias, temp, code, collectives)


def flops_of(lowered: jax.stages.Lowered) -> float | None:
    """Returns the total FLOPs of a program on all devices, or None if XLA doesn't count them."""
    try:
        return _flops_in(lowered.cost_analysis())
    except jax.errors.JaxRuntimeError:  # The devices belong to a topology.
        return None


def _flops_in(costs: Any) -> float | None:
    return (costs or {}).get("flops")


# An instruction of a compiled program: its name, type, operation and operands, and for loops the trip count. A program
# consists of computations, each of which begins with its name and a brace.
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z][\w-]*)\((.*)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_BODY = re.compile(r"(?:body|calls|to_apply|branch_computations)=\{?%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+\d+|pred)(?:e\w+)?\[([\d,]*)\]")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def collectives_of(program: str) -> Sequence[Collective]:
    """Returns the collective operations in the text of a compiled XLA program, largest first.

    >>> program = '''
    ... ENTRY %main (x: f32[8]) -> f32[8] {
    ...   %x = f32[8]{0} parameter(0)
    ...   ROOT %sum = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
    ... }
    ... '''
    >>> collectives_of(program)
    (Collective(kind='all-reduce', count=1, bytes=32),)
    """
    found: dict[str, dict[str, list[int]]] = collections.defaultdict(dict)  # By computation, by kind.
    calls: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    sizes: dict[str, int] = {}
    here = entry = ""
    for line in program.splitlines():
        if begins := _COMPUTATION.match(line):
            here = begins[2]
            entry = here if begins[1] else entry
        elif instruction := _INSTRUCTION.match(line):
            name, kind_of_value, what, rest = instruction.groups()
            sizes[name] = _bytes_of(kind_of_value)
            kind = what.removesuffix("-start")
            if kind in _KINDS:
                operands = re.findall(r"%?([\w.-]+)", rest.split(")")[0])
                size = max(sizes[name], sum(sizes.get(operand, 0) for operand in operands))
                found[here].setdefault(kind, []).append(size)
            trips = int(each[1]) if what == "while" and (each := _TRIPS.search(line)) else 1
            calls[here] += [(body, trips) for body in _BODY.findall(line)]

    def add(computation: str, times: int, totals: dict[str, list[int]]) -> None:
        for kind, each in found[computation].items():
            totals[kind] += [size for size in each for _ in range(times)]
        for body, trips in calls[computation]:
            add(body, times * trips, totals)

    totals: dict[str, list[int]] = collections.defaultdict(list)
    add(entry, 1, totals)
    collectives = [Collective(kind, len(each), sum(each)) for kind, each in totals.items()]
    return tuple(sorted(collectives, key=lambda each: -each.bytes))


def _bytes_of(kind_of_value: str) -> int:
    """Returns the size in bytes of an array or a tuple of arrays, given its type."""
    arrays = _ARRAY.findall(kind_of_value)
    width = lambda name: 1 if name == "pred" else max(int(re.sub(r"\D", "", name)), 8) // 8
    return sum(width(name) * math.prod(int(size) for size in shape.split(",") if size) for name, shape in arrays)


# Dense bfloat16 (float16 before Ampere), without sparsity, from the data sheets of NVIDIA and from "Cloud TPU system
# architecture". A JAX device of TPU v2 and v3 is a core, half a chip. More specific names come first.
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
    """Returns the peak FLOPs per second of a kind of device for bfloat16 matrix products, or None if unknown.

    >>> peak_flops_per_sec("NVIDIA H100 80GB HBM3"), peak_flops_per_sec("cpu")
    (989000000000000.0, None)
    """
    return next((peak for name, peak in _PEAKS.items() if name in device_kind), None)
