"""Functions that estimate the cost of a step (FLOPs and memory) before it runs, even for TPUs that aren't attached."""

from jaxloop.check.costs import cost_analysis, largest_batch, largest_ensemble

__all__ = ["cost_analysis", "largest_batch", "largest_ensemble"]
