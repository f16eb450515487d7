"""The numeric gate: results of attention against float64, with tolerances from the same problem."""
