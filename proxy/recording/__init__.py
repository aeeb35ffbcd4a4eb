"""Takes a model call from the engine into the pool: turns, recorder, sessions, re-delivery, provider text. No HTTP."""
