"""The costs of a step before it runs: FLOPs, memory and communication, even for TPUs that you don't have access to."""

from jaxloop.check.costs import cost_analysis, largest_batch

__all__ = ["cost_analysis", "largest_batch"]
