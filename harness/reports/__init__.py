"""The tables and figures, one folder per family: rows, tables and figures together."""
