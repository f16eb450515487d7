"""The machine: configuration -> cases -> launch -> worker -> record -> tables and figures."""

__version__ = "0.1.0"
