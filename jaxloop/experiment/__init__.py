"""The parts of an experiment: its arguments, data, training, evaluations and checkpoints."""
