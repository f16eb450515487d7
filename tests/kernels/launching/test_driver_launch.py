"""Launching through CUDA's driver with parameters that lie ready: a driver made of Python."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FACTS, STREAM, Compiled, Driver, Kernel, install, number
from torch import Tensor

from kernels.launching import prepared as launch
from kernels.launching.driver import DriverLaunch, NotKnown
from kernels.launching.prepared import PreparedLaunch

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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = install(monkeypatch)
    made.sizes = list(SIZES)
    return made


def compiled_kernel(**metadata: Any) -> Compiled:
    return Compiled(SIGNATURE, **metadata)


def described(x: Tensor) -> SimpleNamespace:
    return SimpleNamespace(base=x, shape=[32, 64], strides=[64, 1], padding="zero")


def prepared(compiled: Compiled) -> PreparedLaunch:
    return PreparedLaunch(
        Kernel(compiled),
        (5, 6, 1),
        {"num_stages": 3, "BLOCK": 64},
        integers=(2**40, 1, 32),
        descriptors=[described],
    )


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    bf16 = torch.empty(32, 64, dtype=torch.bfloat16)
    return bf16, torch.empty(8), torch.empty_like(bf16)


def test_later_launches_pass_new_addresses_and_floats(driver: Driver) -> None:
    compiled = compiled_kernel()
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
        assert (made["shared"], made["stream"], made["num_attributes"]) == (1000, STREAM, 0)
        values = made["values"]
        assert number(values[0]) == x.data_ptr()
        assert [number(raw) for raw in values[1:5]] == [32, 64, 64, 1]
        assert [number(raw) for raw in values[5:7]] == [y.data_ptr(), z.data_ptr()]
        assert [number(raw) for raw in values[7:9]] == [2**40, 32]
        assert ctypes.c_float.from_buffer_copy(values[9]).value == scale
        assert [number(raw) for raw in values[10:]] == [0, 0]


def test_maps_are_left_alone_while_they_lead_to_the_same_place(driver: Driver) -> None:
    call = prepared(compiled_kernel())
    first, second = tensors(), tensors()
    wanted = []
    for given, replaced in ((first, 0), (first, 0), (second, 1), (second, 1), (first, 2)):
        call(*given, floats=(1.0,))
        assert driver.num_replaced == replaced
        wanted.append(given[0].data_ptr())
    # The first was Triton's launch.
    assert [number(made["values"][0]) for made in driver.launches] == wanted[1:]


def test_the_first_tensors_are_not_kept(driver: Driver) -> None:
    compiled = compiled_kernel()
    call = prepared(compiled)
    given = tensors()
    kept = [weakref.ref(x) for x in given]
    call(*given, floats=(1.0,))
    del given
    compiled.launched.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3
    call(*tensors(), floats=(1.0,))
    assert len(driver.launches) == 1


def test_maps_are_encoded_as_triton_does_it(driver: Driver) -> None:
    pytest.importorskip("triton.backends.nvidia.driver")
    x, y, z = tensors()
    prepared(compiled_kernel())(x, y, z, floats=(1.0,))
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
    compiled = compiled_kernel()
    call = prepared(compiled)
    for refuses in (False, True, False):
        driver.refuses = refuses
        call(*tensors(), floats=(1.0,))
    # The first one, and the refused one with its constant.
    assert [arguments[-1] for arguments in compiled.launched] == [1.0, 64]
    assert len(compiled.launched[1]) == len(SIGNATURE)
    assert len(driver.launches) == 1


def test_misaligned_tensors_are_left_to_triton_as_a_whole(driver: Driver) -> None:
    """Code compiled for aligned tensors would read others wrongly, so Triton compiles for them."""
    compiled = compiled_kernel()
    call = prepared(compiled)
    x, y, z = tensors()
    shifted = torch.empty(9)[1:]
    for given, looked_at, launched in (
        ((x, shifted, z), 1, 0),
        ((x, y, z), 2, 0),
        ((x, y, z), 2, 1),
        ((x, shifted, z), 3, 1),
        ((x, y, z), 3, 2),
    ):
        call(*given, floats=(1.0,))
        assert call.kernel.num_looked_at == looked_at
        assert len(driver.launches) == launched


def test_an_interpreter_is_called_each_time(driver: Driver) -> None:
    called = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, int, int]) -> Any:
            return lambda *arguments, **constants: called.append((arguments, constants))

    call = PreparedLaunch(Interpreted(), (1, 1, 1), {"BLOCK": 4}, integers=(3,))
    x = torch.empty(4)
    for scale in (1.0, 2.0):
        call(x, floats=(scale,))
    assert called == [((x, 3, scale), {"BLOCK": 4}) for scale in (1.0, 2.0)]


def test_triton_launches_while_a_profiler_listens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = compiled_kernel()
    call = prepared(compiled)
    call(*tensors(), floats=(1.0,))
    monkeypatch.setattr(launch, "is_watched", lambda: True)
    call(*tensors(), floats=(1.0,))
    assert len(compiled.launched) == 2
    assert not driver.launches


@pytest.mark.parametrize(
    ("metadata", "why"),
    [
        ({"global_scratch_size": 8}, "scratch"),
        ({"profile_scratch_size": 8}, "scratch"),
        ({"launch_cooperative_grid": True}, "another kind of launch"),
        ({"launch_pdl": True}, "another kind of launch"),
        ({"num_ctas": 2}, "clusters"),
        ({"tensordesc_meta": None}, "not a plain map"),
        ({"tensordesc_meta": [FACTS | {"fp4_padded": True}]}, "not a plain map"),
    ],
)
def test_what_is_left_to_triton(driver: Driver, metadata: dict[str, Any], why: str) -> None:
    compiled = compiled_kernel(**metadata)
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
    compiled = compiled_kernel()
    call = prepared(compiled)
    for _ in range(2):
        call(*tensors(), floats=(1.0,))
    assert len(compiled.launched) == 2
    assert not driver.launches


def test_a_missing_driver_is_left_to_triton() -> None:
    if torch.cuda.is_available():
        pytest.skip("has CUDA's driver")
    with pytest.raises(NotKnown, match="CUDA's driver"):
        DriverLaunch(compiled_kernel(), (1, 1, 1), (), 0)
