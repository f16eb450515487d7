"""The transformer, and formulas for its parameters, FLOPs and memory."""
