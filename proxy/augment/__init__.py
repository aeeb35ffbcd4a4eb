"""Requests in another form for the model, and its answers in the agent's form again. Nothing is sampled here."""
