"""Multi-token-prediction heads: layer, loss and weight names. Their optimizer is trainer/drafter.py."""
