"""The loss of each token: policy losses, importance ratios, and the losses that a configuration can name. No model."""
