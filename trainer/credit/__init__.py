"""From rewards to a weight per token: advantages, returns, normalisation. No tensors."""
