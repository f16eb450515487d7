"""Runs cases: launchers, the runner, its run folder and its lock on the device."""
