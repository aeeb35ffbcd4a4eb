"""The monitor: rules over what steps report, their states, and what an alarm does to the run (docs/monitor.md). What
steps report is gathered in trainer/report.
"""
