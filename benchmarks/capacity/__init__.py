"""What each part can do on this machine, and which one limits the rollouts of a day first."""
