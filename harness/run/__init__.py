"""Runs cases: launchers, warm workers, interleaved rounds, and ranks on other hosts."""
