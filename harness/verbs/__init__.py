"""The verbs of `harness`, one module each: `add_to` says what it takes on the command line, `call` does it."""
