"""The engine that runs loops. Read its modules in this order:

run                `Run` holds everything that is kept between calls to the engine: the run's progress, outputs and
                   items. A `Plan` describes the items and limits that an experiment adds to a loop. `Steps` runs a
                   loop's steps through a `Program` and, between steps, calls the items that are due.
agenda             `Agenda` calls items, such as actions, evaluations and recorders of history rows, when they are due.
outputs            `Outputs` holds the outputs of the steps until every item that needs them has read them.
program            `Program` passes batches through the step's hooks and dispatches the steps; it contains the only loop
                   over individual steps. `InFlight` limits how far the host runs ahead of the devices.
feed               `Feed` reads batches and buffers those that were read ahead.
engine, call       `Engine` runs one loop after another. A `Call` describes a single call to the engine.
rehearse           `Course` predicts when items will be due.
"""
