"""Blocks of scores: which rank computes which block, and the loops that compute them."""
