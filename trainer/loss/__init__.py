"""The loss per token: policy loss, ratios, named losses. No model."""
