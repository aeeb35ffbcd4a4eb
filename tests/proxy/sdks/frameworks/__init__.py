"""The task of two steps (task/two_steps.py) for each SDK and framework. Each script runs in its own environment.

The last line that a script prints is JSON: the answer and, where the framework has prescribed forms, the record.
"""
