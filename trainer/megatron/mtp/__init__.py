"""Multi-token-prediction heads: their layer, loss and weight names. Their optimizer is in trainer/drafter.py."""
