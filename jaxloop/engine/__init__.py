"""The engine that runs the loops. Read its modules in this order:

run                `Run` is everything that lasts from call to call: the progress, the outputs, the items. A `Plan`
                   is what an experiment adds to a loop. `Steps` is the loop over steps.
agenda             `Agenda` calls items, such as actions, evaluations and history rows, when they are due.
outputs            `Outputs` holds the outputs of the steps, with a cursor for each reader.
program            `Program` runs steps. No other code repeats them. `InFlight` waits for the devices.
feed               `Feed` reads batches, and keeps those that no step needs yet.
engine, call       `Engine` is the loop over loops. `Call` is one call of it.
rehearse           A rehearsal of the agenda.
"""
