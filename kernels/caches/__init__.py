"""Caches of a transformer's past tokens: one file per kind of cache.

A cache holds keys and values (:mod:`kernels.caches.contiguous`, :mod:`kernels.caches.paged`), or
the compressed latents of multi-head latent attention (:mod:`kernels.caches.latent`), of all
layers of a model and all sequences of a batch. Where a token lies, and whether there is room for
more, is decided on the host in :mod:`kernels.caches.places`; lengths and block tables lie on the
device, where kernels and CUDA graphs read them.
"""

from kernels.caches.choice import CACHES, CacheChoice, CacheShape, cache_choice

__all__ = ["CACHES", "CacheChoice", "CacheShape", "cache_choice"]
