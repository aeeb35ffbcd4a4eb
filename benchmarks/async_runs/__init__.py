"""The runs of `python benchmarks/async_run.py`, the agent whose commands take long, and the figures."""
