"""What a train step says of itself: its metrics, where they are written, and the tokens it trained on."""
