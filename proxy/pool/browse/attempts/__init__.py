"""One attempt: its calls as a tree, conversations, what it did, its log."""
