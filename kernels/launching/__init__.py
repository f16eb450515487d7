"""Launching kernels cheaply: prepared launches, CUDA's driver, CUDA graphs."""
