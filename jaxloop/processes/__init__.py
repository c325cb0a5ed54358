"""Other processes and signals: agreement among processes, interrupts, and the lock of a directory."""
