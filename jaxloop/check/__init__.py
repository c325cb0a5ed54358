"""Checks of a step before it runs: its FLOPs, its memory and its communication, also on TPUs that you don't have."""

from jaxloop.check.costs import cost_analysis, largest_batch

__all__ = ["cost_analysis", "largest_batch"]
