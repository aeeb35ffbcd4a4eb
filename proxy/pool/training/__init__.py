"""What the trainer takes from the pool: leases, steps, finished rollouts. No arithmetic."""
