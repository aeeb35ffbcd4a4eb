"""A run in which context management is learned: tasks that do not fit into the context, and two ways to train notes."""
