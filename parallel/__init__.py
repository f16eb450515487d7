"""Attention and training over many devices, on top of the kernels."""

from parallel.strategy import STRATEGIES, Strategy, strategy

__all__ = ["STRATEGIES", "Strategy", "strategy"]
