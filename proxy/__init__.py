"""The gateway that agents talk to: every model call becomes a row in the pool."""
