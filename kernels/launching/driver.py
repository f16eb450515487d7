"""Launches a compiled kernel through CUDA's driver, with parameters prepared in memory.

Triton's launcher is given all arguments each time: it asks each tensor for its address, the driver
what kind of address that is, and encodes every tensor map anew. Where only addresses change,
writing those into the parameters of the call before is all there is to do. For the attention of a
short sequence that takes a third of the time, and the GPU would wait for it.

What a kernel's parameters are follows from Triton's signature: tensors and numbers in their order,
of a tensor descriptor the map, the shape and the strides, and at the end two addresses of scratch
memory. The driver knows how many there are and how large each is; unless that agrees, and for
whatever else this does not know, Triton launches.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache
from struct import Struct
from threading import Lock
from typing import Any, ClassVar

import torch

_INTEGERS = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}
_MAP_BYTES = 128
_MAP_ALIGNMENT = 64
_L2_PROMOTION_128B = 2
_MAX_RANK = 5

PARAMETER_KINDS = ("fixed", "map", "word", "float")
"""Kinds of parameters: as it was, a tensor map, a tensor's address, a float."""

Contents = tuple[int, bytes, list[tuple[int, bytes]]]
"""A launch: function, CUDA's configuration, kind and bytes of each parameter."""


class NotKnown(Exception):
    """A kernel that only Triton can launch; the message says why."""


class DriverLaunch:
    """One kernel on one grid; made of its arguments, and called with others of the same kind.

    Args:
        compiled: Triton's, which has been launched before.
        grid: blocks in x, y and z.
        arguments: in the order of the signature, whose tensors and tensor descriptors come first.
        device: index of the current one, on which it will always be called.

    Raises:
        NotKnown: it can be launched by Triton only.
    """

    def __init__(
        self, compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], device: int
    ) -> None:
        driver = _driver()
        metadata = compiled.metadata
        launches = ("launch_cooperative_grid", "launch_pdl")
        scratch = ("global_scratch_size", "profile_scratch_size")
        if any(getattr(metadata, name, 0) for name in (*launches, *scratch)):
            raise NotKnown("needs scratch memory or another kind of launch")
        if getattr(metadata, "num_ctas", 1) != 1:
            raise NotKnown("runs in clusters")
        layout = Parameters(compiled, arguments)
        if layout.sizes != _parameter_sizes(compiled.function):
            raise NotKnown("Triton lays its parameters out in another way")
        for address, descriptor, facts in layout.encodings:
            _encode(address, descriptor, facts)
        self._device = device
        self._layout, self._maps = layout, layout.maps
        self._num_maps = len(layout.maps)
        self._mapped = [descriptor.base.data_ptr() for _, descriptor, _ in layout.encodings]
        """Addresses that the tensor maps point to; allocators often return the same ones."""
        # Launches are kept for long, and would keep the first call's tensors with them.
        layout.encodings.clear()
        self._pack, self._changing = Struct(layout.format).pack_into, layout.changing
        self._replace = driver.cuTensorMapReplaceAddress
        self._launch = driver.cuLaunchKernelEx
        self._config = _LaunchConfig(*grid, 32 * metadata.num_warps, 1, 1, metadata.shared)
        self._arguments = (ctypes.addressof(self._config), compiled.function, layout.pointers, None)
        # All calls share the parameters' memory, and the backward pass runs in another thread.
        self._lock = Lock()

    def __call__(self, addresses: Sequence[int], floats: Sequence[float]) -> bool:
        """Launch on the current stream; False if the driver refuses, which Triton may explain.

        Args:
            addresses: of all tensors, also those of tensor descriptors.
        """
        with self._lock:
            for place, address in enumerate(self._maps):
                if addresses[place] != self._mapped[place]:
                    if self._replace(address, addresses[place]):
                        return False
                    self._mapped[place] = addresses[place]
            self._pack(self._changing, 0, *addresses[self._num_maps :], *floats)
            self._config.stream = torch._C._cuda_getCurrentRawStream(self._device)
            return not self._launch(*self._arguments)

    def contents(self) -> Contents:
        """Copies of a launch's parts, from which native.cpp makes its own launches."""
        function, layout = self._arguments[1], self._layout
        with self._lock:
            parameters = [
                (kind, ctypes.string_at(address, size))
                for kind, address, size in zip(
                    layout.kinds, layout.pointers, layout.sizes, strict=True
                )
            ]
            return function, bytes(self._config), parameters


class _LaunchConfig(ctypes.Structure):
    """CUDA's CUlaunchConfig; none of ours has attributes."""

    _fields_: ClassVar = [
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z")],
        *[(name, ctypes.c_uint) for name in ("block_x", "block_y", "block_z")],
        ("shared_memory_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class Parameters:
    """A kernel's parameters in memory: where the changing ones are, and all by their addresses."""

    def __init__(self, compiled: Any, arguments: Sequence[Any]) -> None:
        self.maps: list[int] = []
        """Addresses of the tensor maps, those of the first arguments."""
        self.encodings: list[tuple[int, Any, dict[str, Any]]] = []
        """Address of each map, and what is to be there."""
        self.sizes: list[int] = []
        self.memory: list[Any] = []
        """Keeps what the addresses point to."""
        self.kinds: list[int] = []
        """Place of each parameter in PARAMETER_KINDS."""
        self._addresses: list[int] = []
        kinds = [kind for kind in compiled.src.signature.values() if kind != "constexpr"]
        num_words = sum(kind.startswith("*") for kind in kinds)
        num_floats = kinds.count("fp32")
        self.format = f"={num_words}Q{num_floats}f"
        """Layout of the addresses of plain tensors, and of the floats."""
        self.changing = ctypes.create_string_buffer(8 * num_words + 4 * num_floats)
        words = iter(range(0, 8 * num_words, 8))
        floats = iter(range(8 * num_words, len(self.changing), 4))
        facts = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
        start = ctypes.addressof(self.changing)
        for kind, value in zip(compiled.src.signature.values(), arguments, strict=False):
            if kind == "constexpr":
                continue
            if kind.startswith("*"):
                self._add(start + next(words), 8, "word")
            elif kind.startswith("tensordesc"):
                self._add_descriptor(value, next(facts, None))
            elif kind == "fp32":
                self._add(start + next(floats), 4, "float")
            elif kind in _INTEGERS:
                self._add_fixed(_INTEGERS[kind](value))
            else:
                raise NotKnown(f"a parameter of type {kind}")
        for _ in ("global scratch", "profile scratch"):
            self._add_fixed(ctypes.c_uint64(0))
        self.pointers = (ctypes.c_void_p * len(self._addresses))(*self._addresses)

    def _add(self, address: int, size: int, kind: str) -> None:
        self._addresses.append(address)
        self.sizes.append(size)
        self.kinds.append(PARAMETER_KINDS.index(kind))

    def _add_fixed(self, cell: Any) -> None:
        self.memory.append(cell)
        self._add(ctypes.addressof(cell), ctypes.sizeof(cell), "fixed")

    def _add_descriptor(self, value: Any, facts: dict[str, Any] | None) -> None:
        if facts is None or facts.get("fp4_padded") or value.padding != "zero":
            raise NotKnown("a tensor descriptor that is not a plain map")
        room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        address = -(-ctypes.addressof(room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self.memory.append(room)
        self._add(address, _MAP_BYTES, "map")
        self.maps.append(address)
        self.encodings.append((address, value, facts))
        for size in value.shape:
            self._add_fixed(ctypes.c_int32(size))
        for stride in value.strides:
            self._add_fixed(ctypes.c_int64(stride))


def _encode(address: int, descriptor: Any, facts: dict[str, Any]) -> None:
    """Write the tensor map of ``descriptor``, as Triton's own launcher would."""
    # Only where there is a driver to encode for.
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    rank = len(descriptor.shape)
    if rank > _MAX_RANK:
        raise NotKnown(f"a tensor descriptor of {rank} dimensions")
    # The driver counts dimensions from the innermost, whose stride is always one element.
    strides = [stride * facts["elem_size"] for stride in descriptor.strides[-2::-1]]
    status = _driver().cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(address), TMA_DTYPE_DEVICE_TO_HOST[facts["elem_type"]], rank),
        ctypes.c_void_p(descriptor.base.data_ptr()),
        (ctypes.c_uint64 * rank)(*descriptor.shape[::-1]),
        (ctypes.c_uint64 * rank)(*strides),
        (ctypes.c_uint32 * rank)(*facts["block_size"][::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        *(0, facts["swizzle"], _L2_PROMOTION_128B, 0),
    )
    if status:
        raise NotKnown(f"CUDA's error {status} for a tensor map")


def _parameter_sizes(function: int) -> list[int]:
    """Bytes of each of a kernel's parameters, as the driver knows them."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    find = _driver().cuFuncGetParamInfo
    sizes: list[int] = []
    for number in itertools.count():
        handle = ctypes.c_void_p(function)
        if find(handle, ctypes.c_size_t(number), ctypes.byref(offset), ctypes.byref(size)):
            # It has no parameter of that number.
            return sizes
        sizes.append(size.value)
    raise AssertionError("the count does not end")


@cache
def _driver() -> Any:
    """CUDA's driver library."""
    names = ("cuLaunchKernelEx", "cuFuncGetParamInfo", "cuTensorMapEncodeTiled")
    try:
        library = ctypes.CDLL("libcuda.so.1")
        functions = [getattr(library, name) for name in (*names, "cuTensorMapReplaceAddress")]
    except (OSError, AttributeError) as error:
        raise NotKnown(f"CUDA's driver: {error}") from error
    launch, *_, replace = functions
    launch.argtypes = [ctypes.c_void_p] * 4
    replace.argtypes = [ctypes.c_void_p] * 2
    for function in functions:
        function.restype = ctypes.c_int
    return library
