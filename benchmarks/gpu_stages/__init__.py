"""The stages of `python benchmarks/gpu.py`: what a GPU is asked first, each in a process of its own."""
