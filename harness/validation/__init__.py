"""`harness validate`: trials of a task's solution and of cheats, and their review. No rollouts of agents."""
