"""A clock for tests, which moves only when a test moves it."""

import itertools


class Clock:
    """Returns `now` when called.

    Attributes:
      now: The current time in seconds.
    """

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now

    def during(self, batches, seconds):
        """Yields batches, moving the clock before each by `seconds`: a number, or a list with one per batch."""
        seconds = seconds if isinstance(seconds, list) else itertools.repeat(seconds)
        for batch, each in zip(batches, seconds, strict=False):
            self.now += each
            yield batch
