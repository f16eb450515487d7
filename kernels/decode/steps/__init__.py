"""Decoding as single steps: by PyTorch's operators, and latent attention by our kernels."""
