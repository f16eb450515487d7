"""Every loop in every container, and in PyTorch's: docs/training_loops.md says how each ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from training_loops import LOOPS, outcome
from training_loops.saving import RESHARDED, load_on_rank, save_on_rank
from training_loops.trainer import CONTAINERS, PEERS, Weights

PAGE = Path(__file__).parents[3] / "docs/training_loops.md"

OWN = [name for name in CONTAINERS if name not in (*PEERS, "by hand")]


def cells() -> dict[tuple[str, str], str]:
    """The page's table: what stands there for a loop and a container."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    header, _, *body = rows
    names = [name.strip("`") for name in header[1:]]
    return {(row[0], name): cell for row in body for name, cell in zip(names, row[1:], strict=True)}


def ending(found: list[Weights | str], wanted: Weights, bounds: dict[str, float]) -> str:
    """``yes`` if all ranks end with the wanted weights, or else how it went."""
    if all(isinstance(weights, str) for weights in found):
        return "raises"
    for weights in found:
        assert not isinstance(weights, str), "an error is on all ranks or on none"
        assert weights.keys() == wanted.keys()
        for name, value in wanted.items():
            if not torch.allclose(weights[name], value, **bounds):
                return "drifts"
    return "yes"


def test_the_page_has_every_loop_and_every_container() -> None:
    wanted = {(loop, name) for loop in (*LOOPS, RESHARDED) for name in (*OWN, *PEERS)}
    assert cells().keys() == wanted


def test_nothing_of_ours_is_silently_wrong() -> None:
    assert {cell for (_, name), cell in cells().items() if name in OWN} == {"yes", "raises"}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_end_as_the_page_says(name: str) -> None:
    (wanted, _) = on_ranks(2, outcome, "by hand", name)
    assert not isinstance(wanted, str), wanted
    bounds = {"rtol": 1e-5, "atol": 1e-6}
    if "bfloat16" in name or "Muon" in name:
        # Sums of two ranks, or Newton-Schulz iterations, are rounded to eight bits.
        bounds = {"rtol": 2e-2, "atol": 1e-2}
    said = {container: cell for (loop, container), cell in cells().items() if loop == name}
    ends = {}
    for container, cell in said.items():
        if cell == "hangs":
            assert container in PEERS
            continue
        found = on_ranks(2, outcome, container, name)
        if container in OWN:
            assert not any(isinstance(text, str) and "\n" in text for text in found)
        ends[container] = ending(found, wanted, bounds)
    assert ends == {container: cell for container, cell in said.items() if cell != "hangs"}


@pytest.mark.parametrize("container", [*OWN, *PEERS])
def test_a_checkpoint_of_four_ranks_goes_on_with_two_and_with_one(
    container: str, tmp_path: Path
) -> None:
    (wanted,) = on_ranks(1, outcome, "by hand", "plain")
    assert not isinstance(wanted, str), wanted
    on_ranks(4, save_on_rank, container, tmp_path)
    for num_ranks in (2, 1):
        found = on_ranks(num_ranks, load_on_rank, container, tmp_path)
        end = ending(found, wanted, {"rtol": 1e-5, "atol": 1e-6})
        assert end == cells()[RESHARDED, container]
