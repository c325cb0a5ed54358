"""Upper limits for the measured medians, on CPUs."""

import dataclasses
import statistics
from collections.abc import Mapping

from benchmarks.lineup import (
    DEFAULTS,
    FIT,
    FUNCTIONAL,
    FUSED,
    HAND_WRITTEN_WITH_LOGS,
    KEEPS_LOSSES,
    NAN_POLICY,
    ON_ONE_DEVICE,
    REFERENCE,
    SCAN,
    WITH_LOGS,
)
from benchmarks.moments import (
    BARE_IMPORT,
    BARE_RESTORE,
    BARE_SAVE,
    IMPORT,
    ONE_LOOP,
    PREFETCH,
    RESTORE,
    SAVE,
    SHORT_LOOPS,
    SLOWER,
)
from benchmarks.rounds import Comparison


@dataclasses.dataclass(frozen=True)
class Target:
    """An upper limit on a ratio or a figure.

    Attributes:
      comparison: The name of a `Comparison`.
      name: The name of one of its contestants or figures.
      limit: The largest value that meets the target.
      against: The contestant that the ratio is relative to; None for a figure.
    """

    comparison: str
    name: str
    limit: float
    against: str | None = REFERENCE

    def measured(self, comparisons: Mapping[str, Comparison]) -> float | None:
        """Returns the median of the ratios, or the figure; None if it was not measured."""
        comparison = comparisons.get(self.comparison)
        if comparison is None:
            return None
        if self.against is None:
            return comparison.figures.get(self.name)
        if self.name not in comparison.seconds or self.against not in comparison.seconds:
            return None
        return statistics.median(comparison.ratios(self.name, self.against))


_LOSSES = (
    "The reference drops its losses, while all loops of jaxloop have them on the host at the end, so compare with "
    f"'{KEEPS_LOSSES}'."
)
_NOISE = "This ratio is as noisy as the machine: two runs measured"
# The reason for each missed target, by comparison and name.
_REASONS = {
    "W0": {
        FUSED: "The hand-written scan drops its losses. In addition to what the scan does, each dispatch copies its 32 "
        "losses to the host, and checks that its batches have one shape. This takes 2 to 5 us per step.",
        ON_ONE_DEVICE: f"{_NOISE} 1.116 (before a fix) and 1.019.",
        FUNCTIONAL: f"{_LOSSES} The history of the functional loop has a row for each step, with its time. A callback "
        "returns a pytree of a custom class, which takes the jitted call 0.05 to 0.1 of a step to build.",
        FIT: f"{_LOSSES} The mask of `LossStep` is one more argument, which takes 0.06 of a step.",
        NAN_POLICY: "XLA computes the flags with one more operation per parameter array, which takes a tenth of this "
        "step, and returning and reading them takes as long.",
    },
    "W1": {
        DEFAULTS: f"{_NOISE} 0.992 and 1.054.",
        FUSED: "Fusing only saves the time to dispatch steps. The hand-written scan gains little here, too.",
        WITH_LOGS: "Reading the values of a step blocks the host until the step is done, and then the devices wait for "
        f"the next step; compare with '{HAND_WRITTEN_WITH_LOGS}'.",
    },
    "W2": {NAN_POLICY: f"{_NOISE} 0.933 and 0.990."},
    "W3": {
        DEFAULTS: f"{_NOISE} 0.954 and 1.052.",
        FUSED: "Most of this step is the arithmetic of Adam over 193 leaves, not the dispatch. The hand-written scan "
        "gains little here, too.",
        NAN_POLICY: "Each of the 193 leaves is read once more, by a separate operation.",
    },
    "W4": {DEFAULTS: f"{_NOISE} 0.90 and 1.02.", FUSED: f"{_NOISE} 0.584 and 0.719."},
    "loop boundary": {
        "us a boundary": "If nothing is due, the steps continue without a stop at the end of a loop. The measured "
        "difference is little more than the noise of the machine.",
    },
    "short loops": {
        SHORT_LOOPS: "Before commit b65e2c5, jaxloop kept data of every finished loop, so that ending the next one "
        "took longer and longer in a run of 10,000 steps. Since then the ratio of the CPU times is 0.99.",
    },
    "checkpoint of 26 MB": {SAVE: "jaxloop adds about 3 ms, whatever the size of the checkpoint."},
    "checkpoint of 200 MB": {
        SAVE: f"{_NOISE} 1.128 and 1.047.",
        "ms of stall": "Copying 200 MB takes this long on this machine. Orbax's own save blocks the loop for as long: "
        "see the ratio of the two saves.",
    },
}
REASONS = {(comparison, name): text for comparison, texts in _REASONS.items() for name, text in texts.items()}

TARGETS = [
    Target("W0", DEFAULTS, 1.00, against=KEEPS_LOSSES),
    Target("W0", ON_ONE_DEVICE, 1.00, against=KEEPS_LOSSES),
    Target("W0", FUSED, 1.15, against=SCAN),
    Target("W0", FUNCTIONAL, 1.30),
    Target("W0", FIT, 1.30),
    Target("W1", DEFAULTS, 1.05),
    Target("W1", FUSED, 0.82),
    Target("W1", WITH_LOGS, 1.05),
    Target("W2", DEFAULTS, 1.05),
    Target("W3", DEFAULTS, 1.05),
    Target("W3", FUSED, 0.90),
    Target("W4", DEFAULTS, 1.00),
    Target("W4", FUSED, 0.65),
    *[Target(name, NAN_POLICY, 1.05, against=DEFAULTS) for name in ("W0", "W2", "W3")],
    Target("loop boundary", "us a boundary", 10, against=None),
    Target("short loops", SHORT_LOOPS, 1.10, against=ONE_LOOP),
    Target("checkpoint of 26 MB", SAVE, 1.10, against=BARE_SAVE),
    Target("checkpoint of 26 MB", "ms of stall", 30, against=None),
    Target("checkpoint of 200 MB", SAVE, 1.10, against=BARE_SAVE),
    Target("checkpoint of 200 MB", "ms of stall", 30, against=None),
    Target("restoring 200 MB", RESTORE, 1.30, against=BARE_RESTORE),
    Target("slow data", DEFAULTS, 1.15, against=SLOWER),
    Target("slow data", PREFETCH, 1.15, against=SLOWER),
    Target("import", IMPORT, 1.15, against=BARE_IMPORT),
    Target("second start", "compilations at the second start", 0, against=None),
]
