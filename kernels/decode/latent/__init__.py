"""Absorbed latent attention: append, kernels for any GPU and for Hopper, their launches."""
