"""Random faults against sweeps of small cases: ``python -m tests.soak --help``."""
