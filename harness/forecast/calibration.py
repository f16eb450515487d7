"""A calibration: what was measured of one kind of machine, small enough to come with the package.

``conf/machine/NAME.json`` holds observations, shapes and their times, by the law that they
calibrate, and the records that they are from. Laws are fitted when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.forecast.law import Observation
from harness.paths import CONF

SCHEMA = 3

FOLDER = CONF / "machine"


@dataclass(kw_only=True, slots=True, frozen=True)
class HostSpeed:
    """Microseconds that one host takes to enqueue a kernel, and of an optimizer to list a tensor,
    from steps that waited for it."""

    host: str
    """What tells hosts apart: processors, and the boot that they were measured in."""
    forward_us: float
    backward_us: float
    optimizer_us: float
    bound: bool
    """Whether the step waited for its host; if not, the host is at least as fast."""
    source: int


@dataclass(kw_only=True, slots=True, frozen=True)
class Exposure:
    """What communication adds to a step under one strategy, as a share of its own time."""

    strategy: str
    matmul: str
    """Number format of matmuls: those of tensor cores leave less room beside them."""
    visible: float | None
    """None where no step of it kept its device busy."""
    launches: float | None
    """Launches' worth of the host's time for each tensor of the model, from the backward pass on;
    None where no step of it waited for its host."""
    forward_launches: float | None = None
    """The same in the forward pass, which some strategies gather parameters in."""
    follows: float | None = None
    """Share of its own time that begins after the backward pass and hides behind nothing."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Calibration:
    """What is known of a machine."""

    name: str
    device_name: str
    device: str
    """``cuda`` or ``cpu``."""
    gpus_per_host: int
    device_memory_bytes: int
    num_sms: int
    records: tuple[dict[str, str], ...]
    """Id, revision, sweep and host of each record that observations are from."""
    observations: Mapping[str, tuple[Observation, ...]]
    """By the name of a law."""
    hosts: tuple[HostSpeed, ...]
    exposures: tuple[Exposure, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    """Ratios that steps alone tell, such as what a compiler leaves of elementwise time."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` inverts it."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "device_name": self.device_name,
            "device": self.device,
            "gpus_per_host": self.gpus_per_host,
            "device_memory_bytes": self.device_memory_bytes,
            "num_sms": self.num_sms,
            "records": list(self.records),
            "hosts": [asdict(host) for host in self.hosts],
            "exposures": [asdict(item) for item in self.exposures],
            "factors": dict(self.factors),
            "observations": {
                name: [[list(map(list, item.shapes)), item.ms, item.source] for item in items]
                for name, items in self.observations.items()
            },
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """Read what :meth:`to_dict` wrote. Raises KeyError, TypeError or ValueError otherwise."""
        if values["schema"] != SCHEMA:
            raise ValueError(f"schema {values['schema']}, and this version reads {SCHEMA}")
        return cls(
            **{key: values[key] for key in _PLAIN},
            records=tuple(values["records"]),
            hosts=tuple(HostSpeed(**host) for host in values["hosts"]),
            exposures=tuple(Exposure(**item) for item in values["exposures"]),
            observations={
                name: tuple(
                    Observation(shapes=tuple(map(tuple, shapes)), ms=ms, source=source)
                    for shapes, ms, source in items
                )
                for name, items in values["observations"].items()
            },
        )


_PLAIN = (
    *("name", "device_name", "device", "gpus_per_host", "device_memory_bytes", "num_sms"),
    "factors",
)


def write(calibration: Calibration, path: Path) -> None:
    """One line an observation list, so that differences can be read."""
    values = calibration.to_dict()
    observations = values.pop("observations")
    head = json.dumps(values, indent=1)[:-2]
    lines = ",\n".join(
        f'  "{name}": {json.dumps(items, separators=(",", ":"))}'
        for name, items in sorted(observations.items())
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "observations": {{\n{lines}\n }}\n}}\n')


def read(path: Path) -> Calibration:
    """Raises ValueError in one line where the file is none."""
    try:
        return Calibration.from_dict(json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no calibration ({error}); write it again") from error
