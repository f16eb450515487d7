"""Inference: prefill of prompts, decoding steps from a cache, and the whole model generating."""
