"""A clock for tests, which moves when they say so."""

import itertools


class Clock:
    """Stands still, but for what a test makes it move.

    Attributes:
      now: what it shows, in seconds.
    """

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now

    def during(self, batches, seconds):
        """Gives batches, each after its seconds of a list, or after as many as all others."""
        seconds = seconds if isinstance(seconds, list) else itertools.repeat(seconds)
        for batch, each in zip(batches, seconds, strict=False):
            self.now += each
            yield batch
