"""Attention alone, dense or packed, on one rank or over a split sequence."""
