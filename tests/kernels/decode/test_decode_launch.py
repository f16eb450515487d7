"""Repeated launches of the decode kernels, and their parameters as a fake driver sees them."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FACTS, Compiled, Driver, Kernel, install, number
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON

from kernels.decode import Rotary, flash_decode, latent_append, mla_decode
from kernels.decode.configs import Tiles
from kernels.decode.dense import launch as dense_launch
from kernels.decode.latent import append
from kernels.decode.latent import hopper as hopper_latent
from kernels.decode.latent import launch as latent_launch

pytestmark = RUNS_TRITON

LOG2_E = 1.4426950408889634


class Fake:
    """A kernel with the parameters of a real one, and what of it the driver was told to launch."""

    def __init__(self, real: Any, driver: Driver, function: int, **metadata: Any) -> None:
        self.signature = {name: kind_of(name) for name in inspect.signature(real.fn).parameters}
        compiled = Compiled(self.signature, **metadata)
        compiled.function = function
        self.kernel = Kernel(compiled)
        self.sizes = [size for kind in self.signature.values() for size in sizes_of(kind)] + [8, 8]
        self.driver = driver

    @property
    def launches(self) -> list[dict[str, Any]]:
        """Launches by the driver: the parameters of each, by name."""
        names = [
            name
            for name, kind in self.signature.items()
            for _ in sizes_of(kind)
            if kind != "constexpr"
        ]
        function = self.kernel.compiled.function
        made = [one for one in self.driver.launches if one["function"] == function]
        # Of a descriptor the first, which holds its address.
        return [dict(reversed(list(zip(names, one["values"], strict=False)))) for one in made]

    def addresses(self, *names: str) -> list[int]:
        """The parameters of the latest launch."""
        return [number(self.launches[-1][name]) for name in names]


def kind_of(name: str) -> str:
    if name.endswith("_desc"):
        return "tensordesc<bf16[64, 64],layout>"
    if name.endswith("_ptr"):
        return "*bf16"
    if name in ("scale_log2", "unit_scale"):
        return "fp32"
    return "constexpr" if name.isupper() or name == "num_warps" else "i32"


def sizes_of(kind: str) -> list[int]:
    if kind.startswith("tensordesc"):
        return [128, 4, 4, 8, 8]
    return {"constexpr": [], "i32": [4], "fp32": [4]}.get(kind, [8])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Before it plans are made anew, after it none of its kernels are kept."""
    for module, name in (
        (dense_launch, "_PLANS"), (latent_launch, "_PLANS"), (append, "_PLANS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, {})
    return install(monkeypatch)


def faked(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, module: Any, name: str, **metadata: Any
) -> Fake:
    fake = Fake(getattr(module, name), driver, 1 + len(driver.sizes_of), **metadata)
    driver.sizes_of[fake.kernel.compiled.function] = fake.sizes
    monkeypatch.setattr(module, name, fake.kernel)
    return fake


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Fake:
    return faked(monkeypatch, driver, dense_launch, "flash_decode_kernel")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def int32(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int32)


def flash_inputs(**changes: Any) -> dict[str, Any]:
    """Arguments of flash_decode, with new tensors each time."""
    angles = [empty(128, 8, dtype=torch.float32) for _ in range(2)]
    return {
        "q": empty(2, 4, 1, 16), "k_new": empty(2, 2, 1, 16), "v_new": empty(2, 2, 1, 16),
        "k_cache": empty(2, 2, 64, 16), "v_cache": empty(2, 2, 64, 16), "lengths": int32(2),
        "rotary": Rotary(*angles),
    } | changes  # fmt: skip


def test_other_tensors_are_passed_without_asking_triton(flash: Fake) -> None:
    flash_decode(**flash_inputs())
    assert (flash.kernel.num_looked_at, flash.launches) == (1, [])
    for scale in (None, 0.5):
        given = flash_inputs()
        out = flash_decode(**given, scale=scale)
        rotary = given.pop("rotary")
        wanted = {
            "q_ptr": given["q"], "k_new_ptr": given["k_new"], "v_new_ptr": given["v_new"],
            "k_ptr": given["k_cache"], "v_ptr": given["v_cache"],
            "lengths_ptr": given["lengths"], "table_ptr": given["lengths"],
            "cos_ptr": rotary.cos, "sin_ptr": rotary.sin, "out_ptr": out,
        }  # fmt: skip
        assert flash.addresses(*wanted) == [x.data_ptr() for x in wanted.values()]
        passed = ctypes.c_float.from_buffer_copy(flash.launches[-1]["unit_scale"]).value
        assert passed == pytest.approx((0.25 if scale is None else scale) * LOG2_E)
        strides = ("k_stride_b", "k_stride_h", "k_stride_n", "capacity", "max_positions")
        assert flash.addresses(*strides) == [2 * 64 * 16, 64 * 16, 16, 64, 128]
    assert flash.kernel.num_looked_at == 1
    assert len(flash.launches) == 2


OTHER_PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "strides of q": lambda: {"q": empty(2, 8, 1, 16)[:, ::2]},
    "strides of a cache": lambda: {"v_cache": empty(2, 2, 64, 32)[..., :16]},
    "strides of out": lambda: {"out": empty(2, 8, 1, 16)[:, ::2]},
    "capacity": lambda: {"k_cache": empty(2, 2, 80, 16), "v_cache": empty(2, 2, 80, 16)},
    "dtype": lambda: {
        name: x.half() if x.dtype == torch.bfloat16 else x
        for name, x in flash_inputs().items()
        if isinstance(x, Tensor)
    },
    "a block table": lambda: {"block_table": int32(2, 3)},
    "strides of a block table": lambda: {"block_table": int32(2, 8)[:, :3]},
    "no rotary": lambda: {"rotary": None},
    "interleaved": lambda: {"rotary": flash_inputs()["rotary"]._replace(interleaved=True)},
    "positions": lambda: {
        "rotary": Rotary(*[empty(96, 8, dtype=torch.float32) for _ in range(2)])
    },
    "splits": lambda: {"num_splits": 3},
    "tiles": lambda: {
        "tiles": Tiles(block_m=16, block_n=32, num_warps=4, num_stages=1, programs_per_sm=1)
    },
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_PLANS)
def test_what_lies_in_another_way_is_another_plan(flash: Fake, what: str) -> None:
    flash_decode(**flash_inputs())
    for _ in range(2):
        flash_decode(**flash_inputs(**OTHER_PLANS[what]()))
    assert flash.kernel.num_looked_at == 2
    assert len(flash.launches) == 1
    flash_decode(**flash_inputs())
    assert flash.kernel.num_looked_at == 2


@pytest.mark.parametrize("name", ["q", "k_cache", "lengths", "out"])
def test_misaligned_tensors_are_left_to_triton(flash: Fake, name: str) -> None:
    """They lie as the others do, but where vector loads would fail."""
    flash_decode(**flash_inputs(), out=empty(2, 4, 1, 16))
    for looked_at in (2, 3):
        given = flash_inputs(out=empty(2, 4, 1, 16))
        x = given[name]
        given[name] = empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
        assert given[name].stride() == x.stride()
        flash_decode(**given)
        assert flash.kernel.num_looked_at == looked_at
    flash_decode(**flash_inputs(), out=empty(2, 4, 1, 16))
    assert flash.kernel.num_looked_at == 3
    assert len(flash.launches) == 1


def test_what_is_not_dense_is_copied_each_time(flash: Fake) -> None:
    for _ in range(2):
        lengths, q = int32(4)[::2], empty(2, 4, 1, 32)[..., ::2]
        flash_decode(**flash_inputs(lengths=lengths, q=q))
    assert flash.kernel.num_looked_at == 1
    assert flash.addresses("lengths_ptr", "q_ptr") != [lengths.data_ptr(), q.data_ptr()]
    assert flash.addresses("q_stride_b", "q_stride_h") == [4 * 16, 16]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: {"lengths": int32(2).long()}, "lengths is .*int64"),
        (lambda: {"lengths": int32(2).to("meta")}, "lengths is .* on meta"),
        (lambda: {"k_cache": empty(2, 2, 16, 64).mT}, "k_cache has a last stride"),
        (lambda: {"num_splits": 0}, "num_splits is 0"),
    ],
)
def test_a_good_call_before_lets_no_bad_one_pass(
    flash: Fake, change: Callable[[], dict[str, Any]], message: str
) -> None:
    for _ in range(2):
        flash_decode(**flash_inputs())
    with pytest.raises(ValueError, match=message):
        flash_decode(**flash_inputs(**change()))
    assert len(flash.kernel.compiled.launched) == len(flash.launches) == 1


def latent_inputs(heads: int = 4, rank: int = 16, rope_dim: int = 8) -> dict[str, Any]:
    return {
        "q_latent": empty(2, heads, 1, rank), "q_rope": empty(2, heads, 1, rope_dim),
        "latent_cache": empty(2, 256, rank + rope_dim), "lengths": int32(2), "scale": 0.5,
    }  # fmt: skip


def test_latent_attention(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    fake = faked(monkeypatch, driver, latent_launch, "latent_decode_kernel")
    for _ in range(2):
        given = latent_inputs()
        out = mla_decode(**given)
    assert (fake.kernel.num_looked_at, len(fake.launches)) == (1, 1)
    names = ("q_ptr", "q_rope_ptr", "cache_ptr", "lengths_ptr", "table_ptr", "out_ptr")
    wanted = [given[name] for name in ("q_latent", "q_rope", "latent_cache", "lengths", "lengths")]
    assert fake.addresses(*names) == [x.data_ptr() for x in (*wanted, out)]
    cache = empty(2, 256, 32)[..., :24]
    mla_decode(**latent_inputs() | {"latent_cache": cache})
    mla_decode(**latent_inputs(), implementation="plain")
    assert fake.kernel.num_looked_at == 3


def test_appended_latents(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    fake = faked(monkeypatch, driver, append, "latent_append_kernel")

    def inputs(**changes: Any) -> dict[str, Any]:
        angles = [empty(128, 4, dtype=torch.float32) for _ in range(2)]
        return {
            "q_rope": empty(2, 4, 1, 8), "c_new": empty(2, 1, 16), "k_rope": empty(2, 1, 8),
            "latent_cache": empty(2, 256, 24), "lengths": int32(2), "rotary": Rotary(*angles),
            "lengths_after": int32(2),
        } | changes  # fmt: skip

    for _ in range(2):
        given = inputs()
        turned = latent_append(**given)
    assert (fake.kernel.num_looked_at, len(fake.launches)) == (1, 1)
    names = ("q_rope", "c_new", "k_rope", "lengths", "lengths_after")
    passed = fake.addresses(*(f"{name}_ptr" for name in names))
    assert passed == [given[name].data_ptr() for name in names]
    rotary = given["rotary"]
    assert fake.addresses("cache_ptr", "cos_ptr", "sin_ptr", "out_ptr") == [
        x.data_ptr() for x in (given["latent_cache"], rotary.cos, rotary.sin, turned)
    ]
    wide = Rotary(rotary.cos.double(), rotary.sin.double())
    for looked_at, change in enumerate(
        ({"rotary": wide}, {"lengths_after": None}, {"k_rope": empty(2, 1, 16)[..., :8]}), 2
    ):
        latent_append(**inputs(**change))
        assert fake.kernel.num_looked_at == looked_at
    given = inputs(rotary=None)
    assert latent_append(**given) is given["q_rope"]


def test_latent_attention_on_hopper(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """Two launches, the first with tensor maps; queries in another order are copied."""
    pytest.importorskip("triton.experimental.gluon")
    pytest.importorskip("triton.backends.nvidia.driver")
    from kernels.decode.latent import hopper_kernel as hopper_latent_kernel
    from kernels.decode.latent import merge_kernel

    def use_hopper(call: Any, cache: Tensor, implementation: str) -> bool:
        return cache.data_ptr() % 16 == 0

    monkeypatch.setattr(latent_launch, "_use_hopper", use_hopper)
    plain = faked(monkeypatch, driver, latent_launch, "latent_decode_kernel")
    attend = faked(
        monkeypatch, driver, hopper_latent_kernel, "hopper_latent_kernel",
        tensordesc_meta=[FACTS] * 4,
    )  # fmt: skip
    merge = faked(monkeypatch, driver, merge_kernel, "merge_kernel")
    pieces: list[Tensor] = []
    memory = hopper_latent.workspace.pieces
    given_memory = SimpleNamespace(
        pieces=lambda *sizes: pieces.append(memory(*sizes)) or pieces[-1]
    )
    monkeypatch.setattr(hopper_latent, "workspace", given_memory)
    for _ in range(2):
        given = latent_inputs(64, 512, 64)
        out = mla_decode(**given, num_splits=3)
    assert (attend.kernel.num_looked_at, merge.kernel.num_looked_at) == (1, 1)
    wanted = {
        "q_desc": given["q_latent"], "q_rope_desc": given["q_rope"],
        "cache_desc": given["latent_cache"], "rope_desc": given["latent_cache"],
        "lengths_ptr": given["lengths"], "table_ptr": given["lengths"],
        "out_ptr": out, "pieces_ptr": pieces[-1],
    }  # fmt: skip
    assert attend.addresses(*wanted) == [x.data_ptr() for x in wanted.values()]
    wanted = {name: wanted[name] for name in ("lengths_ptr", "out_ptr", "pieces_ptr")}
    assert merge.addresses(*wanted) == [x.data_ptr() for x in wanted.values()]
    assert merge.addresses("num_workers", "num_programs") == [6, 6]

    given = latent_inputs(64, 512, 64)
    given["q_latent"] = empty(2, 128, 1, 512)[:, ::2]
    for _ in range(2):
        mla_decode(**given, num_splits=3)
    assert attend.addresses("q_desc") != [given["q_latent"].data_ptr()]
    assert plain.kernel.num_looked_at == 0
    given = latent_inputs(64, 512, 64)
    shape = given["latent_cache"].shape
    given["latent_cache"] = empty(shape.numel() + 1)[1:].view(shape)
    mla_decode(**given, num_splits=3)
    assert plain.kernel.num_looked_at == 1
