"""Runs tasks: one agent, one task, one sandbox, one verdict, many at a time."""
