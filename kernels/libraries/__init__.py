"""Adapters of the FlashAttention libraries, FlashInfer, FlashMLA and PyTorch's operators."""
