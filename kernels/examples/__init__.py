"""Small Triton kernels to learn from; none of them is a choice of ``attention=``."""
