"""From recorded rollouts to micro-batches: rows, prefix trees, packing. No rewards, no loss."""
