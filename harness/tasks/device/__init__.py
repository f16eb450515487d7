"""The limits of the hardware: memory bandwidth, matmul rate, collective operations."""
