"""What a run reports: metrics, alarms, exporters, views of a step's tokens. Nothing here changes an update."""
