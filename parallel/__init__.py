"""Attention and training over many devices, on top of the kernels."""

from kernels import BACKENDS
from parallel.strategies.strategy import STRATEGIES, Strategy, strategy

# attention= also chooses among schemes over several ranks.
BACKENDS.extend("parallel.context.schemes")

__all__ = ["BACKENDS", "STRATEGIES", "Strategy", "strategy"]
