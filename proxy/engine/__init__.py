"""Everything about the inference engine: starting it, talking to it, and a scripted one for tests and teachers."""
