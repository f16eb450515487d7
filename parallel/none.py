"""One device, nothing to coordinate."""

from __future__ import annotations

from dataclasses import dataclass

from parallel.strategy import Strategy, strategy


@strategy("none")
@dataclass(kw_only=True, slots=True)
class SingleDevice(Strategy):
    """The model as it is, on one device."""

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        if self.dp != 1:
            raise ValueError(
                f"parallel.dp={self.dp}: parallel=none runs on one device; "
                "choose a strategy that keeps ranks together, such as parallel=ddp_torch"
            )
