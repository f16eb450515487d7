"""The console commands: measure, report, compare, show status, write up."""
