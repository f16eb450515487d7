"""Sequences exchanged for heads: each rank attends to whole sequences in some of the heads."""
