"""The source that a case runs: hashes of its files, found by following imports."""
