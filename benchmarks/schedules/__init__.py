"""The simulation of `python benchmarks/schedule.py`: runs under each schedule, their figures, and a picture of them."""
