"""The verbs of `trainer` and the processes that they start. No training arithmetic lives here."""
