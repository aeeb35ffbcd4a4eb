"""Users' functions, called in a limited process: the weight of a rollout in its batch, or its reward. None is ours."""
