"""Attention alone, by backend, shape and length."""
