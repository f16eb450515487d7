"""Training strategies, one file per choice of ``parallel=``."""
