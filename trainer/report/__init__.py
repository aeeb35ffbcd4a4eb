"""What a step tells people: metrics, alarms, views, exporters. Nothing here changes an update."""
