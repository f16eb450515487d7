"""Profiles of memory: what the allocators did in one step, as a timeline by category."""
