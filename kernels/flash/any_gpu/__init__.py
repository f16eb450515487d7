"""FlashAttention-2 in Triton for any CUDA GPU, and for Triton's interpreter."""
