"""What an agent finds in its sandbox: set-up, clean start, variations, protected files. No verdicts."""
