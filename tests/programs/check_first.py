"""Runs `OuterLoop.check` before each run of an OuterLoop, in examples that have no problems."""

import functools

import jaxloop


def check_first():
    """Makes each run of an OuterLoop fail if `check` finds a problem; returns a function that undoes this."""
    call = jaxloop.OuterLoop.__call__

    @functools.wraps(call)
    def checked(self, *args, **kwargs):
        report = self.check(*args, **kwargs)
        assert report.ok, f"A false alarm:\n{report}"
        return call(self, *args, **kwargs)

    jaxloop.OuterLoop.__call__ = checked
    return functools.partial(setattr, jaxloop.OuterLoop, "__call__", call)
