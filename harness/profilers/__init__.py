"""One file per choice of ``profile=``."""
