"""Arguments that the decode kernels refuse, with one line that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_checks import int32
from torch import Tensor
from triton_device import DEVICE, RUNS_TRITON, randn

from kernels.decode import Rotary, flash_decode, mla_decode

pytestmark = RUNS_TRITON


class TestBadInput:
    """One line that names the argument, before anything is written."""

    FLASH: dict[str, tuple[dict[str, Any], str]] = {  # noqa: RUF012
        "dims": ({"q": (2, 4, 16)}, r"q is \[2, 4, 16\]: must be \[batch, heads, new"),
        "heads": ({"q": (2, 3, 1, 16)}, "k_new has 2 heads: must divide the 3 heads of q"),
        "head_dim": (
            {"q": (2, 4, 1, 300), "k_new": (2, 2, 1, 300)},
            "q has head_dim 300: must be 1 to 256",
        ),
        "new": ({"v_new": (2, 2, 2, 16)}, r"v_new is .*: must be \[2, 2, 1, 16\] float32"),
        "cache": ({"k_cache": (2, 2, 40, 8)}, r"k_cache is .*: must be \[2, 2, 40, 16\] float32"),
        "caches": ({"v_cache": (2, 2, 39, 16)}, r"v_cache is .*: must be \[2, 2, 40, 16\] float32"),
        "room": (
            dict.fromkeys(("k_new", "v_new"), (2, 2, 41, 16)) | {"q": (2, 4, 41, 16)},
            "q has 41 new tokens: must be 1 to 40, the cache's capacity",
        ),
    }

    @pytest.mark.parametrize("name", FLASH)
    def test_shapes(self, name: str) -> None:
        change, message = self.FLASH[name]
        shapes = {
            "q": (2, 4, 1, 16), "k_new": (2, 2, 1, 16), "v_new": (2, 2, 1, 16),
            "k_cache": (2, 2, 40, 16), "v_cache": (2, 2, 40, 16),
        } | change  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            flash_decode(*(randn(*shape) for shape in shapes.values()), int32([3, 4]))
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"lengths": torch.tensor([3, 4])}, r"lengths is \[2\] int64 .*: must be \[2\] int32"),
            ({"block_table": torch.zeros(2, 3)}, r"block_table is .*: must be \[2, blocks\] int32"),
            ({"rotary": Rotary(torch.ones(9, 9), torch.ones(9, 9))}, "turns 18 entries: must be"),
            ({"rotary": Rotary(torch.ones(9, 4), torch.ones(9, 2))}, "rotary.sin is .*alike"),
            ({"num_splits": 0}, "num_splits is 0: must be 1 or more"),
            ({"out": torch.zeros(2, 4, 1, 8)}, r"out is .*: must be \[2, 4, 1, 16\]"),
            ({"q": torch.zeros(2, 4, 1, 16).int()}, "q is int32: must be one of float32, float16"),
            ({"k_cache": torch.zeros(2, 2, 16, 40).mT}, "k_cache has a last stride of 40"),
        ],
    )
    def test_arguments(self, options: dict[str, Any], message: str) -> None:
        if "rotary" in options and DEVICE == "cuda":
            old = options["rotary"]
            options = {"rotary": Rotary(old.cos.to(DEVICE), old.sin.to(DEVICE))}
        moved = {k: x.to(DEVICE) if isinstance(x, Tensor) else x for k, x in options.items()}
        given = {
            "q": randn(2, 4, 1, 16), "k_new": randn(2, 2, 1, 16), "v_new": randn(2, 2, 1, 16),
            "k_cache": randn(2, 2, 40, 16), "v_cache": randn(2, 2, 40, 16),
            "lengths": int32([3, 4]),
        }  # fmt: skip
        cache = given["k_cache"].clone()
        with pytest.raises(ValueError, match=message) as error:
            flash_decode(**(given | moved))
        assert "\n" not in str(error.value)
        assert torch.equal(given["k_cache"], cache)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"q_rope": torch.zeros(2, 4, 2, 8)}, r"q_rope is .*: must be \[2, 4, 1, 8\]"),
            (
                {"latent_cache": torch.zeros(2, 40, 16)},
                r"latent_cache is .*: must be \[2, 40, 24\]",
            ),
            ({"latent_cache": torch.zeros(2, 1, 40, 24)}, r"must be \[batch, max_len, rank"),
            ({"block_table": torch.zeros(1, 3).int()}, r"block_table is .*: must be \[2, blocks\]"),
        ],
    )
    def test_latent(self, options: dict[str, Any], message: str) -> None:
        given = {
            "q_latent": randn(2, 4, 1, 16), "q_rope": randn(2, 4, 1, 8),
            "latent_cache": randn(2, 40, 24), "lengths": int32([3, 4]), "scale": 0.2,
        }  # fmt: skip
        moved = {name: x.to(DEVICE) for name, x in options.items()}
        with pytest.raises(ValueError, match=message):
            mla_decode(**(given | moved))

    def test_implementation(self) -> None:
        tensors = randn(1, 4, 1, 16), randn(1, 4, 1, 8), randn(1, 40, 24), int32([3])
        with pytest.raises(ValueError, match="implementation is fast: must be auto, hopper or"):
            mla_decode(*tensors, scale=0.2, implementation="fast")
        with pytest.raises(ValueError, match="implementation is hopper: "):
            mla_decode(*tensors, scale=0.2, implementation="hopper")
