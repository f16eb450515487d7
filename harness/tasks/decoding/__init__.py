"""Inference: prefill of prompts, steps from a cache, and the whole model generating."""
