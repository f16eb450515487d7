"""Kernels of profiled steps, and where they lie under the roofline."""
