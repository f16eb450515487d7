"""Running cases: launchers, warm workers, rounds in turns, ranks on other hosts."""
