"""From what an agent left to a reward: isolation, verifier, checkers, judge. No set-up."""
