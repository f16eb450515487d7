"""Groups of warm workers that measure cases: the process of a rank, and its parent's side."""
