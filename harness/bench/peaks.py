"""Memory of a case on a CUDA device, apart from what the process held before it.

PyTorch's allocator counts more than a case's tensors, and less than its CUDA graphs:

- cuBLAS works in memory that PyTorch allocates at the first matmul of each thread on each stream
  (32 MiB on Hopper, unless ``CUBLAS_WORKSPACE_CONFIG`` says otherwise), and keeps. The backward
  pass has a thread of its own, and graphs are captured on a stream of their own. All of these are
  made before a case begins, and count as what was there before it.
- A CUDA graph's pool is reserved for as long as the graph lives, while the allocator counts a
  temporary of the graph as free once it was captured.
"""

from __future__ import annotations

import gc

import torch

from kernels.launching.graphs import capture_stream

_DEFAULT_POOL = (0, 0)
"""The id of the segments that belong to no graph's pool."""


def start_afresh(device: torch.device) -> int:
    """Free what nobody uses, renew cuBLAS's workspaces, and reset the peaks.

    No graph that was captured before may be replayed afterwards.

    Returns:
        The bytes allocated on the device then.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    start(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def start(device: torch.device) -> None:
    """Reset the peaks to what is allocated now, with the workspaces of cuBLAS.

    Cached memory is kept, or the first pass would pay for allocating it again.
    """
    gc.collect()
    _multiply(device)
    with torch.cuda.stream(capture_stream(device_index(device))):
        _multiply(device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)


def _multiply(device: torch.device) -> None:
    """Matmuls of both passes, which make workspaces that do not exist."""
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        x = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        bias = torch.ones(16, device=device, dtype=torch.bfloat16)
        torch.autograd.grad((x @ x).sum(), x)
        torch.autograd.grad(torch.nn.functional.linear(x, x, bias).sum(), x)


def idle_graph_bytes(device: torch.device) -> int:
    """Bytes that pools of CUDA graphs reserve beyond the tensors that the allocator counts."""
    index = device_index(device)
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) != _DEFAULT_POOL
    )


def device_index(device: torch.device) -> int:
    """The number of a CUDA device, which may be meant as the current one."""
    return torch.cuda.current_device() if device.index is None else device.index
