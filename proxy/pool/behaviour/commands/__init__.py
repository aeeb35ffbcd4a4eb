"""What the commands of a script name, and what they write when they fail. No events."""
