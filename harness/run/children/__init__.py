"""Processes of ranks, as a parent starts and ends them: events, logs, time limits, families."""
