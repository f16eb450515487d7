"""Attention on sequences that are split over several ranks, one file per choice."""
