"""What memory holds over a step, and its peak."""
