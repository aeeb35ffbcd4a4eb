"""A call's way from the engine into the pool: turn, recorder, sessions, retries, provider text. No HTTP."""
