"""The engine that runs the loops. Read its modules in this order:

run       `Run` is everything that lasts from call to call: the progress, the outputs, the items.
agenda    `Agenda` calls items, such as actions, evaluations and history rows, when they are due.
outputs   `Outputs` holds the outputs of the steps, with a cursor for each reader.
program   `Program` runs steps. No other code loops over steps.
feed      `Feed` reads batches, and keeps those that no step needs yet.
plan      `Plan` is what an experiment adds to a loop.
engine    `Engine` is the loop over loops, and the loop over steps.
"""
