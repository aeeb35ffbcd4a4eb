"""Files of recorded rollouts for other programs (docs/pool.md). What is read is proxy/pool/read's matter."""
