"""What the hardware reaches by itself: matmuls, copies, collective operations."""
