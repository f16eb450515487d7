"""Kernel profiles: a trace of torch.profiler or Nsight Systems, read into rows of kernels."""
