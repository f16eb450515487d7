"""ToyModel of CS336 assignment 2 (section 1.1.5): two linear layers around a layer norm.

Small enough to say by hand which dtype torch.autocast gives to each of its tensors.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ToyModel(nn.Module):
    """x [N, in_features] -> logits [N, out_features]: fc2(ln(relu(fc1 x))), without biases."""

    def __init__(self, in_features: int, hidden_features: int, out_features: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features, bias=False)
        self.ln = nn.LayerNorm(hidden_features)
        self.fc2 = nn.Linear(hidden_features, out_features, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats, in whatever dtype autocast decides on."""
    return F.cross_entropy(logits, targets)
