"""The runs of `python benchmarks/signal.py`: experiments, their teachers, and the figures."""
