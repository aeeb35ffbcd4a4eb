"""Tests of the project's own agent."""
