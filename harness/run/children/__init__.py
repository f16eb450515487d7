"""Worker processes, from both ends: events, logs, time limits, and what dies with them."""
