"""Attention over several ranks: time, efficiency, balance of FLOPs."""
