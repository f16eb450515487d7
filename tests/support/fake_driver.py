"""CUDA's driver and Triton's compiled kernels, made of Python: what would be launched is kept."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.launching import driver as driver_launch

STREAM = 77

FACTS = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}


class Driver:
    """Keeps what it is asked to launch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each parameter of a kernel; ``sizes_of`` has those of functions, by number."""
        self.sizes_of: dict[int, list[int]] = {}
        self.refuses = False
        self.num_replaced = 0
        self.launches: list[dict[str, Any]] = []
        self.encoded: list[dict[str, Any]] = []

    def cuFuncGetParamInfo(self, function: Any, number: Any, offset: Any, size: Any) -> int:
        sizes = self.sizes_of.get(function.value, self.sizes)
        if number.value >= len(sizes):
            return 1
        size._obj.value = sizes[number.value]
        return 0

    def cuTensorMapEncodeTiled(
        self, room: Any, dtype: int, rank: int, base: Any, sizes: Any, strides: Any, box: Any,
        *options: Any,
    ) -> int:  # fmt: skip
        ctypes.c_uint64.from_address(room.value).value = base.value
        self.encoded.append(
            {
                "rank": rank,
                "base": base.value,
                "sizes": list(sizes),
                "strides": list(strides)[: rank - 1],
                "box": list(box),
                "swizzle": options[2],
            }
        )
        return 0

    def cuTensorMapReplaceAddress(self, room: int, address: int) -> int:
        assert room % 64 == 0
        self.num_replaced += 1
        ctypes.c_uint64.from_address(room).value = address
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, pointers: Any, extra: None) -> int:
        if self.refuses:
            return 1
        found = driver_launch._LaunchConfig.from_address(config)
        sizes = [min(size, 8) for size in self.sizes_of.get(function, self.sizes)]
        values = [
            ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)
        ]
        self.launches.append(
            {
                "function": function,
                "grid": (found.grid_x, found.grid_y, found.grid_z),
                "threads": (found.block_x, found.block_y, found.block_z),
                "shared": found.shared_memory_bytes,
                "stream": found.stream,
                "num_attributes": found.num_attributes,
                "values": values,
            }
        )
        return 0


class Compiled:
    """A compiled kernel as Triton gives it; keeps its own launches."""

    def __init__(self, signature: dict[str, str], **metadata: Any) -> None:
        self.src = SimpleNamespace(signature=signature)
        self.function = 1234
        self.launched: list[tuple[Any, ...]] = []
        facts = {"num_warps": 12, "shared": 1000, "tensordesc_meta": [FACTS], **metadata}
        self.metadata = SimpleNamespace(**facts)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, **_: self.launched.append(arguments)


class Kernel:
    """Before it is compiled; counts how often Triton looked at all arguments."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.arg_names = list(compiled.src.signature)
        self.num_looked_at = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            self.num_looked_at += 1
            self.compiled[grid](*arguments)
            return self.compiled

        return run


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver in the place of CUDA's."""
    made = Driver()
    monkeypatch.setattr(driver_launch, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return made


def number(raw: bytes) -> int:
    """A parameter's bytes as an unsigned number."""
    return int.from_bytes(raw, "little")
