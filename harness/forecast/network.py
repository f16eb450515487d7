"""Networks between hosts: collectives in two stages, and the slowest of many hosts.

A collective over ranks of several hosts moves its bytes inside each host over its own links, and
between hosts over all rails at once, in a pipeline: the slower stage decides (hierarchical rings,
as NCCL's on rail-optimised fabrics). Values live in ``conf/network/*.yaml``, each with its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from harness.paths import config_files

DEFAULT = "infiniband_ndr"


@dataclass(kw_only=True, slots=True, frozen=True)
class Network:
    """What lies between hosts."""

    name: str
    gb_s_per_gpu: float
    """Line rate in one direction."""
    efficiency: float
    """Of the line rate, what large messages reach."""
    latency_us: float
    """One hop between hosts."""
    rails: int
    """Ports of a host that a collective uses together."""
    oversubscription: float
    """Of the fabric: how many times the hosts' rate exceeds its bisection."""
    gpus_per_host: int
    straggler_sigma: float
    """Standard log deviation of a host's step from the others'."""
    source: str

    def between_hosts_ms(self, size: float, ranks: int, factor: float) -> float:
        """Time of the stage between hosts of a collective of size S in bytes.

        Args:
            factor: bytes that enter a host, as a multiple of S, for many hosts: 1 of an
                all-gather or a reduce-scatter, 2 of an all-reduce.
        """
        hosts = math.ceil(ranks / self.gpus_per_host)
        if hosts == 1:
            return 0.0
        rate = self.rails * self.gb_s_per_gpu * self.efficiency / self.oversubscription * 1e9
        hops = factor * math.ceil(math.log2(hosts))
        return (factor * size * (hosts - 1) / hosts / rate) * 1e3 + hops * self.latency_us / 1e3

    def straggling(self, ranks: int) -> tuple[float, float]:
        """Expected excess of the slowest host's step over the median one, and its deviation.

        The maximum of n normal deviates is about sqrt(2 ln n) of theirs (David and Nagaraja,
        Order Statistics, section 10.5).
        """
        hosts = math.ceil(ranks / self.gpus_per_host)
        if hosts == 1:
            return 0.0, 0.0
        most = math.sqrt(2 * math.log(hosts))
        return self.straggler_sigma * most, self.straggler_sigma / most


def network(name: str = DEFAULT) -> Network:
    """The network of ``conf/network/NAME.yaml``. Raises ValueError in one line if none is."""
    files = config_files("network")
    if name not in files:
        raise ValueError(f"network={name}: no such network; one of {', '.join(sorted(files))}")
    return _read(str(files[name]))


@cache
def _read(path: str) -> Network:
    values: Any = OmegaConf.to_container(OmegaConf.load(path))
    return Network(**values)
