"""The engine that runs the loops. Read its modules in this order:

program   `Program` runs steps. No other code loops over steps.
ledger    `Ledger` stores the outputs of the steps, with a cursor for each reader.
agenda    `Agenda` contains the end actions and determines which of them are due.
progress  `Progress` counts steps, examples, seconds and loops.
stepper   `Stepper` reads a loop's batches, runs and counts its steps, and collects their outputs.
moments   `Moments` runs everything that is due between two steps, in a fixed order.
engine    `Engine` runs one loop after another, and saves and restores its own state.
"""
