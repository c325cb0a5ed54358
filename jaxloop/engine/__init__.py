"""The engine that runs the loops. Read its modules in this order:

run                `Run` is everything that lasts from call to call: the progress, the outputs, the items.
agenda             `Agenda` calls items, such as actions, evaluations and history rows, when they are due.
outputs, pending   `Outputs` holds the outputs of the steps, with a cursor for each reader.
program            `Program` runs steps. No other code repeats them.
feed               `Feed` reads batches, and keeps those that no step needs yet.
plan               `Plan` is what an experiment adds to a loop.
steps, call        `Steps` is the loop over steps.
engine             `Engine` is the loop over loops.
auto, rehearse     The measurement of "auto"; a rehearsal of the agenda.
"""
