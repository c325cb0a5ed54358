"""The parts of an experiment: its arguments, its training, its evaluations, and what a checkpoint holds."""
