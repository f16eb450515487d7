"""Launching through CUDA's driver with parameters that lie ready: a driver made of Python."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import _driver_launch as driver_launch
from kernels import _launch as launch
from kernels._driver_launch import DriverLaunch, NotKnown
from kernels._launch import Launch

STREAM = 77

SIGNATURE = {
    "x_desc": "tensordesc<bf16[1, 64],layout>",
    "y_ptr": "*fp32",
    "z_ptr": "*bf16",
    "stride": "i64",
    "one": "constexpr",
    "rows": "i32",
    "scale": "fp32",
    "BLOCK": "constexpr",
}
SIZES = [128, 4, 4, 8, 8, 8, 8, 8, 4, 4, 8, 8]
"""Map, two of shape, two strides, two tensors, two integers, a float, and two of scratch."""

FACTS = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}


class Driver:
    """Keeps what it is asked to launch."""

    def __init__(self) -> None:
        self.sizes = list(SIZES)
        self.refuses = False
        self.num_replaced = 0
        self.launches: list[dict[str, Any]] = []
        self.encoded: list[dict[str, Any]] = []

    def cuFuncGetParamInfo(self, function: Any, number: Any, offset: Any, size: Any) -> int:
        if number.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[number.value]
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
        sizes = [min(size, 8) for size in self.sizes]
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
                "attributes": found.num_attributes,
                "values": values,
            }
        )
        return 0


class Compiled:
    """Of a kernel, what Triton gives; counts its own launches."""

    def __init__(self, **metadata: Any) -> None:
        self.src = SimpleNamespace(signature=SIGNATURE)
        self.function = 1234
        self.launched: list[tuple[Any, ...]] = []
        facts = {"num_warps": 12, "shared": 1000, "tensordesc_meta": [FACTS], **metadata}
        self.metadata = SimpleNamespace(**facts)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, **_: self.launched.append(arguments)


class Kernel:
    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        self.arg_names = list(compiled.src.signature)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            self.compiled[grid](*arguments)
            return self.compiled

        return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(driver_launch, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return made


def described(x: Tensor) -> SimpleNamespace:
    return SimpleNamespace(base=x, shape=[32, 64], strides=[64, 1], padding="zero")


def prepared(compiled: Compiled) -> Launch:
    return Launch(
        Kernel(compiled), (5, 6, 1), {"BLOCK": 64}, integers=(2**40, 1, 32), descriptors=[described]
    )


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    bf16 = torch.empty(32, 64, dtype=torch.bfloat16)
    return bf16, torch.empty(8), torch.empty_like(bf16)


def number(raw: bytes) -> int:
    return int.from_bytes(raw, "little")


def test_later_launches_pass_new_addresses_and_floats(driver: Driver) -> None:
    compiled = Compiled()
    call = prepared(compiled)
    first, second, third = tensors(), tensors(), tensors()
    call(*first, floats=(1.0,))
    assert len(compiled.launched) == 1
    assert not driver.launches

    call(*second, floats=(0.5,))
    call(*third, floats=(0.25,))
    assert len(compiled.launched) == 1
    assert len(driver.launches) == 2
    for made, (x, y, z), scale in zip(driver.launches, (second, third), (0.5, 0.25), strict=True):
        assert made["function"] == 1234
        assert (made["grid"], made["threads"]) == ((5, 6, 1), (384, 1, 1))
        assert (made["shared"], made["stream"], made["attributes"]) == (1000, STREAM, 0)
        values = made["values"]
        assert number(values[0]) == x.data_ptr()
        assert [number(raw) for raw in values[1:5]] == [32, 64, 64, 1]
        assert [number(raw) for raw in values[5:7]] == [y.data_ptr(), z.data_ptr()]
        assert [number(raw) for raw in values[7:9]] == [2**40, 32]
        assert ctypes.c_float.from_buffer_copy(values[9]).value == scale
        assert [number(raw) for raw in values[10:]] == [0, 0]


def test_maps_are_left_alone_while_they_lead_to_the_same_place(driver: Driver) -> None:
    call = prepared(Compiled())
    first, second = tensors(), tensors()
    wanted = []
    for given, replaced in ((first, 0), (first, 0), (second, 1), (second, 1), (first, 2)):
        call(*given, floats=(1.0,))
        assert driver.num_replaced == replaced
        wanted.append(given[0].data_ptr())
    # The first was Triton's launch.
    assert [number(made["values"][0]) for made in driver.launches] == wanted[1:]


def test_maps_are_encoded_as_triton_does_it(driver: Driver) -> None:
    pytest.importorskip("triton.backends.nvidia.driver")
    x, y, z = tensors()
    prepared(Compiled())(x, y, z, floats=(1.0,))
    assert driver.encoded == [
        {
            "rank": 2,
            "base": x.data_ptr(),
            # Innermost first, strides in bytes.
            "sizes": [64, 32],
            "strides": [128],
            "box": [64, 1],
            "swizzle": 3,
        }
    ]


def test_triton_launches_what_the_driver_refuses(driver: Driver) -> None:
    compiled = Compiled()
    call = prepared(compiled)
    for refuses in (False, True, False):
        driver.refuses = refuses
        call(*tensors(), floats=(1.0,))
    # The first one, and the refused one with its constant.
    assert [arguments[-1] for arguments in compiled.launched] == [1.0, 64]
    assert len(driver.launches) == 1


def test_triton_launches_while_a_profiler_listens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Compiled()
    call = prepared(compiled)
    call(*tensors(), floats=(1.0,))
    monkeypatch.setattr(launch, "_is_watched", lambda: True)
    call(*tensors(), floats=(1.0,))
    assert len(compiled.launched) == 2
    assert not driver.launches


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"global_scratch_size": 8}, "scratch"),
        ({"profile_scratch_size": 8}, "scratch"),
        ({"launch_cooperative_grid": True}, "another kind of launch"),
        ({"num_ctas": 2}, "clusters"),
        ({"tensordesc_meta": None}, "not a plain map"),
        ({"tensordesc_meta": [FACTS | {"fp4_padded": True}]}, "not a plain map"),
    ],
)
def test_what_is_left_to_triton(driver: Driver, metadata: dict[str, Any], why: str) -> None:
    compiled = Compiled(**metadata)
    x, y, z = tensors()
    arguments = (described(x), y, z, 2**40, 1, 32, 1.0)
    with pytest.raises(NotKnown, match=why):
        DriverLaunch(compiled, (1, 1, 1), arguments, 0)
    call = prepared(compiled)
    for _ in range(2):
        call(x, y, z, floats=(1.0,))
    assert len(compiled.launched) == 2
    assert not driver.launches


@pytest.mark.parametrize("change", [SIZES[:-1], [*SIZES, 8], [*SIZES[:7], 4, *SIZES[8:]]])
def test_parameters_that_the_driver_knows_otherwise_are_left_to_triton(
    driver: Driver, change: list[int]
) -> None:
    """A triton that passes one more, or one of another size, must not be misled."""
    driver.sizes = change
    compiled = Compiled()
    call = prepared(compiled)
    for _ in range(2):
        call(*tensors(), floats=(1.0,))
    assert len(compiled.launched) == 2
    assert not driver.launches


def test_a_missing_driver_is_left_to_triton() -> None:
    if torch.cuda.is_available():
        pytest.skip("has CUDA's driver")
    with pytest.raises(NotKnown, match="CUDA's driver"):
        DriverLaunch(Compiled(), (1, 1, 1), (), 0)
