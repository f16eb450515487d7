"""Peak rates of accelerators, by the name that the driver reports; values in ``conf/hardware``.

Model FLOPs utilisation divides by the dense peak of the precision. A device that no file
names exactly has no peak here, and its MFU stays blank: variants of one chip (SXM, PCIe, NVL,
a MIG slice) differ by up to a factor of several, so a near match would be a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from harness.paths import config_files


@dataclass(kw_only=True, slots=True, frozen=True)
class Hardware:
    """One device model; a number comes from ``source`` unless a comment beside it names another."""

    name: str
    match: tuple[str, ...]
    """Names that torch and NVML report, compared whole, without case and vendor."""
    peak_tflops: dict[str, float]
    """Dense peak by ``bfloat16``, ``float16``, ``tf32``, ``float32``; absent if it has none."""
    memory_bandwidth_gb_s: float
    memory_gib: float
    source: str
    multiprocessors: int | None = None
    """None if the file does not say."""
    aliases: tuple[str, ...] = ()
    """Shorter names by which ``machine=`` knows it: a chip is meant in its most common form."""


def find_hardware(device_name: str | None) -> Hardware | None:
    """The hardware that the driver calls ``device_name``, or None if no file knows it."""
    return _by_device_name().get(_normalised(device_name or ""))


def hardware_named(name: str) -> Hardware | None:
    """The hardware that the driver, a file or an alias calls ``name``, or None."""
    files = hardware_names()
    aliases = {alias: known for known in files.values() for alias in known.aliases}
    return find_hardware(name) or files.get(name) or aliases.get(name)


def hardware_names() -> dict[str, Hardware]:
    """All hardware, by the names of its files."""
    found: dict[str, Hardware] = {}
    for name, path in config_files("hardware").items():
        try:
            values: Any = OmegaConf.to_container(OmegaConf.load(path))
            names = {"match": tuple(values["match"]), "aliases": tuple(values.get("aliases", ()))}
            hardware = Hardware(**{**values, **names})
        except (OSError, YAMLError, TypeError, KeyError) as error:
            problem = " ".join(f"{error}".split())
            raise ValueError(
                f"{path}: no hardware ({problem}); write it like those in conf/hardware"
            ) from error
        found[name] = hardware
    return found


@cache
def _by_device_name() -> dict[str, Hardware]:
    return {
        _normalised(name): hardware
        for hardware in hardware_names().values()
        for name in hardware.match
    }


def _normalised(device_name: str) -> str:
    return device_name.strip().lower().removeprefix("nvidia ").removeprefix("tesla ")
