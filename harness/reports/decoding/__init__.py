"""Prefill, steps from a cache, and generation."""
