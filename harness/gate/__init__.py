"""The numeric gate: attention, decoding and training against float64, tolerances from the case."""
