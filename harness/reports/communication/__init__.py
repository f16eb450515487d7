"""Collective operations, measured and counted."""
