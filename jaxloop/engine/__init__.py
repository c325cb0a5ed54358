"""What runs the loops: to be read in this order.

program   takes steps: the only code that repeats them.
ledger    keeps what they have reported, with a cursor for each reader.
agenda    knows which action is due when.
progress  counts steps, examples, seconds and loops.
stepper   draws the batches of a loop, has their steps taken, counts them, and collects their outputs.
moments   calls what is due between two steps, in its order.
engine    runs loop after loop, and is saved and restored.
"""
