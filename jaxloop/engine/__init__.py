"""The engine that runs the loops. Read its modules in this order:

program   `Program` runs steps. No other code loops over steps.
ledger    `Ledger` stores what the steps reported, with a cursor for each reader.
agenda    `Agenda` contains the end actions and determines which of them are due.
progress  `Progress` counts steps, examples, seconds and loops.
stepper   `Stepper` reads the batches of a loop, runs and counts its steps, and collects their outputs.
moments   `Moments` runs everything that is due between two steps, in a fixed order.
engine    `Engine` runs one loop after another, and saves and restores its own state.
"""
