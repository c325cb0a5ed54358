"""A run that hangs ends with a report of which process hangs where; one that is slow goes on."""

import pytest
from programs import hanging

import jaxloop
from jaxloop import __main__ as command_line


def test_a_hang_in_one_process_is_named(tmp_path, capsys):
    problems = hanging.problems_of(tmp_path / "run", "begin", processes=1, process=0)
    assert problems == []
    command_line.main(["status", str(tmp_path / "run")])
    assert "hang: dispatching steps after step 7, in HangingStep.begin" in capsys.readouterr().out


def test_a_hang_in_one_of_two_processes_is_named_and_both_exit(tmp_path):
    assert hanging.problems_of(tmp_path / "run", "begin", processes=2, process=1) == []


def test_a_run_with_slow_data_goes_on(tmp_path):
    """Several batches together take longer to read than a step may take."""
    assert hanging.problems_of(tmp_path / "run", "reading", processes=1, process=0) == []


def test_a_slow_run_within_its_limits_goes_on(tmp_path):
    """Compiling, a program's first run, evaluating, saving, and several steps together take longer than a step may."""
    assert hanging.problems_of(tmp_path / "run", "slow", processes=1, process=0) == []


@pytest.mark.parametrize("limits", [{"step_secs": 0}, {"eval_secs": "1 h"}, {"startup_secs": True}])
def test_limits_that_are_no_seconds_are_refused(limits):
    with pytest.raises(ValueError, match=rf"Watchdog.{next(iter(limits))} must be a positive number of seconds"):
        jaxloop.Watchdog(**limits)
