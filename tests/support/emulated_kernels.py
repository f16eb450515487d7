"""Kernels behind a driver made of Python: on a CPU, from raw addresses.

Each has the parameters of the real one, in a real launch's order and layout, and computes from
nothing but the values of its parameters: whoever launches one with a wrong address, stride or scale
gets a wrong result. Those for Hopper are made of Python, and compute in float64; those for any GPU
are the real ones, in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FACTS, Compiled, Driver, install, number
from torch import Tensor

from kernels.flash import dispatch, native
from kernels.flash.any_gpu import chunks
from kernels.flash.any_gpu import launch as any_gpu
from kernels.flash.hopper import launch as hopper
from kernels.flash.hopper import plans

CONTEXT = 5
LOG2_E = math.log2(math.e)

Values = dict[str, Any]
"""Parameters by name: numbers, addresses, and for a descriptor (address, shape, strides)."""

Grid = tuple[int, int, int]

Compute = Callable[[Values, Grid], None]


def at(address: int, dtype: torch.dtype, shape: Any, strides: Any) -> Tensor:
    """The memory there as a tensor."""
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(tuple(shape), tuple(strides))


def contiguous(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return at(address, dtype, shape, torch.empty(shape, device="meta").stride())


class Kernel:
    """Replaces a Triton kernel, before and after it is compiled."""

    def __init__(self, real: Any, compute: Compute, gpu: EmulatedGpu) -> None:
        self.arg_names = list(getattr(real, "arg_names", None) or real.fn.__code__.co_varnames)
        self.compute, self.gpu = compute, gpu
        self.by_triton = 0
        """How often it was launched by what stands for Triton."""

    def __getitem__(self, grid: Grid) -> Any:
        def run(*arguments: Any, **constants: Any) -> Compiled:
            given = dict(zip(self.arg_names, arguments, strict=False)) | constants
            given = {name: given[name] for name in self.arg_names if name in given}
            signature = {name: _kind(value, name in constants) for name, value in given.items()}
            compiled = Compiled(signature, tensordesc_meta=[FACTS] * len(given))
            compiled.function = self.gpu.add(self, signature, given)
            self.by_triton += 1
            self.compute({name: _as_value(value) for name, value in given.items()}, grid)
            compiled.launched = _Relaunched(self, given, grid)
            return compiled

        return run


class _Relaunched(list):
    """The list to which a :class:`fake_driver.Compiled` appends the arguments of launches."""

    def __init__(self, kernel: Kernel, given: dict[str, Any], grid: Grid) -> None:
        super().__init__()
        self.kernel, self.names, self.grid = kernel, list(given), grid

    def append(self, arguments: Any) -> None:
        self.kernel.by_triton += 1
        values = zip(self.names, arguments, strict=True)
        self.kernel.compute({name: _as_value(value) for name, value in values}, self.grid)


def _kind(value: Any, constant: bool) -> str:
    if hasattr(value, "base"):
        return "tensordesc<layout>"
    if isinstance(value, Tensor):
        return "*any"
    # Triton compiles a 1 in, and None.
    if constant or value is None or (value == 1 and isinstance(value, int)):
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    return "i32" if value < 2**31 else "i64"


def _as_value(value: Any) -> Any:
    if hasattr(value, "base"):
        return value.base.data_ptr(), tuple(value.shape), tuple(value.strides)
    return value.data_ptr() if isinstance(value, Tensor) else value


class EmulatedGpu:
    """Knows each function's parameters, and runs what is launched."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._record = driver.cuLaunchKernelEx
        driver.cuLaunchKernelEx = self.launch  # type: ignore[method-assign]
        self.functions: dict[int, tuple[Kernel, dict[str, str], dict[str, Any]]] = {}
        self.launches: list[str] = []
        """Names of the kernels that the driver, and not Triton, was told to launch."""
        self.streams: list[int | None] = []
        self.error = 0
        """Launches return it instead of running, unless it is 0."""
        self.delay_s = 0.0
        """Seconds for which launches leave their parameters unread, for other threads to change."""
        self.kernels: dict[str, Kernel] = {}

    def add(self, kernel: Kernel, signature: dict[str, str], given: dict[str, Any]) -> int:
        function = 1000 + len(self.functions)
        self.functions[function] = (kernel, signature, given)
        sizes = []
        for name, kind in signature.items():
            if kind.startswith("tensordesc"):
                rank = len(given[name].shape)
                sizes += [128, *[4] * rank, *[8] * rank]
            elif kind != "constexpr":
                sizes.append(4 if kind in ("i32", "fp32") else 8)
        self.driver.sizes_of[function] = [*sizes, 8, 8]
        return function

    def launch(self, config: int, function: int, pointers: Any, extra: Any) -> int:
        """Replaces CUDA's cuLaunchKernelEx."""
        if self.error:
            return self.error
        time.sleep(self.delay_s)
        self._record(config, function, pointers, None)
        made = self.driver.launches.pop()
        kernel, signature, given = self.functions[function]
        raw = iter(made["values"])
        values: Values = {}
        for name, kind in signature.items():
            if kind.startswith("tensordesc"):
                rank = len(given[name].shape)
                address = number(next(raw))
                shape, strides = ([number(next(raw)) for _ in range(rank)] for _ in range(2))
                values[name] = (address, tuple(shape), tuple(strides))
            elif kind == "fp32":
                values[name] = ctypes.c_float.from_buffer_copy(next(raw)).value
            else:
                values[name] = given[name] if kind == "constexpr" else number(next(raw))
        self.launches.append(next(n for n, k in self.kernels.items() if k is kernel))
        self.streams.append(made["stream"])
        kernel.compute(values, made["grid"])
        return 0


def _mask(scores: Tensor, causal: bool) -> Tensor:
    q_len, kv_len = scores.shape[-2:]
    if not causal:
        return scores
    visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    return scores.masked_fill(~visible, -math.inf)


DTYPE = torch.bfloat16


def forward(x: Values) -> None:
    q, k, v = (at(x[f"{name}_desc"][0], DTYPE, *x[f"{name}_desc"][1:]) for name in "qkv")
    strides = (x["stride_ob"], x["stride_oh"], x["stride_os"], 1)
    lse = contiguous(x["lse_ptr"], torch.float32, *q.shape[:3])
    keys, values = (y.double().repeat_interleave(x["group_size"], 1) for y in (k, v))
    scores = _mask(q.double() @ keys.mT * (x["scale_log2"] / LOG2_E), x["CAUSAL"])
    found = scores.logsumexp(-1)
    lse.copy_(found)
    p = (scores - found.nan_to_num(neginf=0.0)[..., None]).exp()
    at(x["o_ptr"], DTYPE, (*q.shape[:3], x["VALUE_DIM"]), strides).copy_(p @ values)


def row_statistics(x: Values) -> None:
    heads, rows, lines = x["num_heads"], x["q_len"], x["plane"] // x["padded_len"]
    shape = (lines // heads, heads, rows, x["VALUE_DIM"])
    o = at(x["o_ptr"], DTYPE, shape, (x["stride_ob"], x["stride_oh"], x["stride_os"], 1))
    do = at(x["do_ptr"], DTYPE, shape, (x["stride_dob"], x["stride_doh"], x["stride_dos"], 1))
    lse = contiguous(x["lse_ptr"], torch.float32, lines, rows)
    statistics = contiguous(x["statistics_ptr"], torch.float32, 2, lines, x["padded_len"])
    statistics[0, :, :rows] = lse.where(lse > -math.inf, torch.tensor(math.inf)) * LOG2_E
    statistics[1, :, :rows] = -(o.double() * do.double()).sum(-1).reshape(lines, rows)
    contiguous(x["counts_ptr"], torch.int32, x["SUMS"] * lines, x["padded_len"] // 64).zero_()
    if x["num_key_counts"]:
        contiguous(x["key_counts_ptr"], torch.int32, x["num_key_counts"]).zero_()


def backward(x: Values) -> None:
    names = ("q_desc", "do_desc", "k_desc", "v_desc")
    q, do, k, v = (at(x[name][0], DTYPE, *x[name][1:]).double() for name in names)
    batch, heads, rows, head_dim = q.shape
    lines, padded = x["num_lines"], x["padded_len"]
    # Of a program, and of a turn.
    size = 128 if x["BLOCK_D"] <= 128 or "BLOCK_V" in x else 64
    query, key = (torch.arange(n) // size for n in (rows, k.shape[2]))
    in_bands = x["ORDER"] in ("bands", "halves")
    # Of each pair of a query and a key, to which sum of dq it adds.
    sum_of = torch.zeros(rows, len(key), dtype=torch.int64)
    if x["ORDER"] == "keys":
        sum_of += key >= x["order_count"]
    elif in_bands:
        sum_of = ((query[:, None] - key) // x["order_count"]).clamp_min(0)
    num_sums = int(sum_of.max()) + 1
    counts = contiguous(x["counts"], torch.int32, num_sums * lines, padded // 64)
    assert not counts.any(), "counts begin at zero"
    counts.fill_(7)
    statistics = contiguous(x["stat_desc"][0], torch.float32, 2, lines, padded).double()
    lse, minus_delta = (s[:, :rows].reshape(batch, heads, rows, 1) for s in statistics)
    parts = x["group_size"] // x["num_members"]
    keys, values = (y.repeat_interleave(x["group_size"], 1) for y in (k, v))
    scores = _mask(q @ keys.mT * (x["scale_log2"] / LOG2_E), x["CAUSAL"])
    p = (scores - lse / LOG2_E).exp()
    ds = p * (do @ values.mT + minus_delta)
    sums = contiguous(x["dq_sums"], torch.float32, num_sums, lines, padded, x["BLOCK_D"])
    for part in range(num_sums):
        those = sum_of == part
        of_keys = (ds * those) @ keys
        # Turns that none of these keys comes to stay as they were: no numbers, here.
        seen = _mask(torch.zeros(those.shape, dtype=torch.float64), x["CAUSAL"]) == 0
        reached = torch.isin(query, query[(those & seen).any(1)])
        of_keys = torch.where(reached[:, None], of_keys, torch.nan)
        sums[part, :, :rows, :head_dim] = of_keys.reshape(lines, rows, head_dim)
    assert x["SHARED"] == (parts > 1 or in_bands or x["ORDER"] == "sections")
    if x["SHARED"]:
        num_key_lines, padded_keys = batch * k.shape[1], x["padded_keys"]
        key_counts = contiguous(x["key_counts"], torch.int32, num_key_lines, padded_keys // 64)
        assert not key_counts.any(), "counts begin at zero"
        key_counts.fill_(7)
        row = x["BLOCK_D"] + x.get("BLOCK_V", x["BLOCK_D"])
        contiguous(x["key_sums"], torch.float32, num_key_lines, padded_keys, row).fill_(7)
    for y, letter, factor in (((ds.mT @ q), "k", x["scale"]), ((p.mT @ do), "v", 1.0)):
        strides = (x[f"stride_{letter}b"], x[f"stride_{letter}h"], x[f"stride_{letter}s"], 1)
        members = y.unflatten(1, (k.shape[1], x["group_size"])).sum(2)
        at(x[f"d{letter}_ptr"], DTYPE, members.shape, strides).copy_(members * factor)


def finish_dq(x: Values) -> None:
    lines, rows, width = x["BATCH"] * x["num_heads"], x["q_len"], x["HEAD_DIM"]
    shape = (x["SUMS"], lines, x["padded_len"], x["BLOCK_D"])
    first, *further = contiguous(x["sums_ptr"], torch.float32, *shape).double()
    turn = x["TURN"]
    last_key = torch.arange(rows) // turn * turn + turn - 1 + x["kv_len"] - rows
    dq = torch.where((last_key >= 0)[:, None], first[:, :rows, :width], 0.0)
    for place, sums in enumerate(further, 1):
        reached = last_key >= place * x["turns_apart"] * turn
        dq = dq + torch.where(reached[:, None], sums[:, :rows, :width], 0.0)
    dq = dq * x["scale"]
    shape = (x["BATCH"], x["num_heads"], rows, width)
    strides = (x["stride_qb"], x["stride_qh"], x["stride_qs"], 1)
    at(x["dq_ptr"], DTYPE, shape, strides).copy_(dq.view(shape))


def emulate(monkeypatch: pytest.MonkeyPatch, batch: int) -> EmulatedGpu:
    """Hopper kernels run here, on CPU tensors of so many sequences."""
    from kernels.flash.hopper import backward as hopper_backward
    from kernels.flash.hopper import backward_narrow as hopper_narrow
    from kernels.flash.hopper import backward_wide as hopper_wide
    from kernels.flash.hopper import forward as hopper_forward
    from kernels.flash.hopper import forward_small as hopper_small
    from kernels.flash.hopper import rows as hopper_rows

    gpu = EmulatedGpu(install(monkeypatch))

    def with_batch(compute: Callable[[Values], None]) -> Compute:
        return lambda values, grid: compute({"BATCH": batch, **values})

    for module, name, compute in (
        (hopper_forward, "flash_forward", forward),
        (hopper_small, "flash_forward_small", forward),
        (hopper_backward, "flash_backward", backward),
        (hopper_wide, "flash_backward_wide", backward),
        (hopper_narrow, "flash_backward_narrow", backward),
        (hopper_rows, "row_statistics", row_statistics),
        (hopper_rows, "finish_dq", finish_dq),
    ):
        gpu.kernels[name] = Kernel(getattr(module, name), with_batch(compute), gpu)
        monkeypatch.setattr(module, name, gpu.kernels[name])
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(dispatch, "_choose", lambda problem, implementation, direction: hopper)
    monkeypatch.setattr(plans, "FORWARD_PLANS", {})
    monkeypatch.setattr(plans, "BACKWARD_PLANS", {})
    properties = SimpleNamespace(multi_processor_count=132, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return gpu


def emulate_any_gpu(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> EmulatedGpu:
    """The kernels for any GPU run here, on float32 CPU tensors, as a GPU of so many would."""
    gpu = EmulatedGpu(install(monkeypatch))

    def interpreted(real: Any) -> Compute:
        def compute(values: Values, grid: Grid) -> None:
            arguments = {
                name: contiguous(value, torch.float32, 1) if name.endswith("_ptr") else value
                for name, value in values.items()
            }
            real[grid](**arguments)

        return compute

    for name in ("forward", "merge", "row_terms", "backward_dkv", "backward_dq", "sum"):
        real = getattr(any_gpu, f"{name}_kernel")
        gpu.kernels[name] = Kernel(real, interpreted(real), gpu)
        monkeypatch.setattr(any_gpu, f"{name}_kernel", gpu.kernels[name])
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.setattr(chunks, "num_multiprocessors", lambda device: multiprocessors)
    chunks.chunk_rows.cache_clear()
    for remembered in ("_configs", "_plans", "_row_terms"):
        monkeypatch.setattr(any_gpu, remembered, {})
    return gpu


class Callbacks:
    """A driver's functions as addresses, for compiled code; they run what Python is given."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self.stream = 77
        self.contexts: list[int] = []
        """The contexts that were made current, where a thread had none."""
        self.has_context = True
        self.num_replaced = 0
        self._kept = [
            ctypes.CFUNCTYPE(integer, *[pointer] * 4)(
                lambda config, function, pointers, extra: gpu.launch(
                    config,
                    function,
                    (pointer * len(gpu.driver.sizes_of[function])).from_address(pointers),
                    extra,
                )
            ),
            ctypes.CFUNCTYPE(integer, pointer, pointer)(self._replace),
            ctypes.CFUNCTYPE(integer, pointer)(self._get_context),
            ctypes.CFUNCTYPE(integer, pointer)(self._set_context),
            ctypes.CFUNCTYPE(integer, integer, pointer)(self._current_stream),
        ]
        self.addresses = tuple(ctypes.cast(f, pointer).value or 0 for f in self._kept)

    def _replace(self, room: int, address: int) -> int:
        assert room % 64 == 0
        self.num_replaced += 1
        ctypes.c_uint64.from_address(room).value = address
        return 0

    def _get_context(self, context: int) -> int:
        ctypes.c_uint64.from_address(context).value = CONTEXT if self.has_context else 0
        return 0

    def _set_context(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _current_stream(self, device: int, stream: int) -> int:
        ctypes.c_uint64.from_address(stream).value = self.stream
        return 0
