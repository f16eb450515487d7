"""The benchmark harness: command line -> cases -> workers -> records -> tables and figures."""

__version__ = "0.1.0"
