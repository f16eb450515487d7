"""Results of which a few rows are summed in float32."""

from __future__ import annotations

import pytest
import torch

from parallel.context.blocks.partial_sum import PartialSum
from parallel.context.blocks.score_blocks import few_rows


class TestFewRows:
    def test_the_least_slice_with_all_parts(self) -> None:
        assert few_rows([slice(5, 7), slice(2, 3), slice(4, 4)], 100) == slice(2, 7)
        assert few_rows([], 8) == slice(0, 0)
        assert few_rows([slice(9, 9)], 8) == slice(0, 0)

    @pytest.mark.parametrize(("stop", "found"), [(3, slice(0, 3)), (4, None), (5, None)])
    def test_half_of_all_rows_are_not_few(self, stop: int, found: slice | None) -> None:
        assert few_rows([slice(0, stop)], 8) == found


class TestPartialSum:
    def test_sums_are_rounded_once(self) -> None:
        """257 additions of 2^-8 to 1: to a bfloat16 number each would be lost."""
        value = torch.ones(1, 2, 8, 3, dtype=torch.bfloat16)
        total = PartialSum(value, slice(2, 5))
        for _ in range(257):
            total.add([slice(3, 5)], torch.full((1, 2, 2, 3), 2.0**-8, dtype=torch.bfloat16))
        result = total.result()
        assert result.dtype == torch.bfloat16
        assert (result[:, :, 3:5] == 2.0).all()
        assert (result[:, :, :3] == 1.0).all()
        assert (result[:, :, 5:] == 1.0).all()

    def test_several_slices_one_after_another(self) -> None:
        total = PartialSum(torch.zeros(1, 1, 8, 1, dtype=torch.bfloat16), slice(1, 7))
        part = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
        total.add([slice(6, 7), slice(2, 4)], part)
        assert total.result().flatten().tolist() == [0, 0, 2, 3, 0, 0, 1, 0]

    @pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 8), slice(0, 8), slice(0, 2)])
    def test_rows_that_get_their_first_result_late(self, rows: slice) -> None:
        value = torch.zeros(1, 1, 8, 1, dtype=torch.bfloat16)
        total = PartialSum(value, slice(2, 5))
        value[:, :, rows] = 7
        total.take_anew(rows)
        expected = value.clone()
        assert torch.equal(total.result(), expected)

    def test_no_rows(self) -> None:
        value = torch.ones(1, 1, 4, 1, dtype=torch.bfloat16)
        assert PartialSum(value, slice(0, 0)).result() is value
