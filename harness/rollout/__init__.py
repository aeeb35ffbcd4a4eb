"""One rollout: attempts until one comes to an outcome. Which rollouts run, and when, is decided in harness/loop.py."""
