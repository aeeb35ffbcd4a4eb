"""Detectors of reward hacking. Each is a pure function from a scene to its findings; none asks a model."""
