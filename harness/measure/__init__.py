"""Attention calls on one rank: inputs, the two passes, the numeric check, timelines."""
