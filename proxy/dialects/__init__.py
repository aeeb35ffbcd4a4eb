"""The wire formats that agents speak: one file per dialect, each with the same functions in the same order."""
