"""One attempt: its calls as a tree, conversations, what it did, its log. Groups and runs are in the room above."""
