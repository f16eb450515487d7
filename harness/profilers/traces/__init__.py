"""Profiles of time: a trace or an Nsight Systems report, read into rows of kernels."""
