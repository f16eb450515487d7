"""A small language model trained on sequences that the ranks share, each with a part of every one.

    torchrun --nproc-per-node 2 -m parallel.examples.split_training

:func:`train` is all that a program of one's own needs: labels before the split, each rank's tokens
and positions, attention over all ranks while the model runs, and gradients added up. The losses are
those of one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.split import next_token_labels, position_ids, shard, split_sdpa

VOCABULARY, D_MODEL, HEADS, LENGTH = 32, 32, 4, 64


def train(
    model: nn.Module,
    tokens: Tensor,
    scheme: str,
    *,
    steps: int = 20,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """The loss of each step; ``tokens`` [B, S] are whole on every rank, and ``model`` the same."""
    labels = next_token_labels(tokens)
    num_labels = labels.ne(-100).sum()
    positions = position_ids(scheme, length=tokens.shape[1], group=group)
    tokens, labels = (shard(x, scheme, dim=1, group=group) for x in (tokens, labels))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        with split_sdpa(scheme, group=group):
            logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_labels
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


class SmallModel(nn.Module):
    """Two layers of attention and an MLP; knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, D_MODEL)
        self.positions = nn.Embedding(LENGTH, D_MODEL)
        self.qkv = nn.ModuleList(nn.Linear(D_MODEL, 3 * D_MODEL) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Linear(D_MODEL, D_MODEL) for _ in range(2))
        self.head = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, S, vocabulary] of tokens [B, S] at ``positions`` [S]."""
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, mlp in zip(self.qkv, self.mlps, strict=True):
            q, k, v = (
                y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in qkv(x).chunk(3, dim=-1)
            )
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + o.transpose(1, 2).flatten(2)
            x = x + F.gelu(mlp(x))
        return self.head(x)


def seeded() -> tuple[SmallModel, Tensor]:
    """The same model and tokens [4, LENGTH] everywhere: sequences that count on from a start."""
    torch.manual_seed(0)
    model = SmallModel()
    starts = torch.randint(VOCABULARY, (4, 1))
    return model, (starts + torch.arange(LENGTH)) % VOCABULARY


def main() -> None:
    dist.init_process_group("gloo")
    losses = train(*seeded(), "zigzag")
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        print(f"loss on {ranks} ranks: {losses[0]:.4f}, after {len(losses)} steps {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
