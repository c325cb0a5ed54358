"""Coordination with other processes: agreement among the processes of a job, signals, and directory locks."""
