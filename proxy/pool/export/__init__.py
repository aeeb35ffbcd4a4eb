"""Files of recorded rollouts for other programs (docs/pool.md). What they hold is read by proxy/pool/read."""
