"""From recorded rollouts to micro-batches: rows, trees, packing. No rewards, no loss."""
