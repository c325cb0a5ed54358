"""Tools for the operation of runs: logs, status, commands, comparisons, failures and rewinding."""
