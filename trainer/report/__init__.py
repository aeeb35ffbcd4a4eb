"""What a run reports: metrics, exporters, views of a step's tokens. Nothing here changes an update."""
