"""Attention alone, dense or packed, on one rank or with its sequences split over several."""
