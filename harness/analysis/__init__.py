"""From records to a tidy frame, statistics, and comparisons with an interval."""
