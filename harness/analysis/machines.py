"""Which records were measured on one host: by more than its name, which clouds give to all of them.

Two records are of one host where they name the same boot of its kernel, which containers share, or
GPUs in common. They are of two where their names, CPUs, numbers of CPUs or machine ids differ, or
where one lists all GPUs that its host shows and the other has none of these. Fields that a record
does not have, as older ones, say neither. Two machines of one name without GPUs that were cloned
from one image, machine id included, and rebooted since, cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Machine:
    """What an environment says of its host; None and empty where it does not."""

    name: str | None = None
    boot: str | None = None
    machine_id: str | None = None
    cpu_model: str | None = None
    num_cpus: int | None = None
    gpus: frozenset[str] = frozenset()
    """The UUIDs of its GPUs, as far as known."""
    all_gpus: bool = False
    """Whether these are all that the host shows."""

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Machine:
        """The machine of rank 0."""
        name = environment.get("host")
        listed = environment.get("gpu_uuids") or []
        ranks = [environment, *environment.get("ranks", [])]
        used = [rank.get("gpu_uuid") for rank in ranks if rank.get("host") == name]
        return cls(
            name=name,
            boot=environment.get("boot_id"),
            machine_id=environment.get("machine_id"),
            cpu_model=environment.get("cpu_model"),
            num_cpus=environment.get("num_cpus"),
            gpus=frozenset(filter(None, [*listed, *used])),
            all_gpus=bool(listed),
        )

    def is_other(self, machine: Machine) -> bool:
        """Whether the two are known to be different hosts."""
        if self.boot is not None and self.boot == machine.boot:
            return False
        if self.gpus & machine.gpus:
            return False
        if self.gpus and machine.gpus and (self.all_gpus or machine.all_gpus):
            return True
        return any(
            one is not None and other is not None and one != other
            for one, other in (
                (self.name, machine.name),
                (self.cpu_model, machine.cpu_model),
                (self.num_cpus, machine.num_cpus),
                (self.machine_id, machine.machine_id),
            )
        )

    def may_be_other(self, machine: Machine) -> bool:
        """Whether the two are different hosts, or one names GPUs and the other none.

        Hosts of a cloud are like each other in all else, but for the boot.
        """
        if self.boot is not None and self.boot == machine.boot:
            return False
        return self.is_other(machine) or bool(self.gpus) != bool(machine.gpus)


def host_labels(machines: Sequence[Machine]) -> list[str | None]:
    """A name for each machine's host; hosts of one name are told apart by a GPU or a boot.

    None where a record does not name its host. A record that tells too little joins the first host
    of its name.
    """
    hosts: dict[str, list[list[Machine]]] = {}
    places: dict[Machine, int] = {}
    # Those that tell most first, so that what is known of a host is known when others join it.
    for machine in sorted(dict.fromkeys(machines), key=_knowledge, reverse=True):
        if machine.name is None:
            continue
        known = hosts.setdefault(machine.name, [])
        place = next((i for i, host in enumerate(known) if _is_of(machine, host)), len(known))
        if place == len(known):
            known.append([])
        known[place].append(machine)
        places[machine] = place
    return [
        None if machine.name is None else _label(machine.name, places[machine], hosts[machine.name])
        for machine in machines
    ]


def _knowledge(machine: Machine) -> int:
    found = (machine.boot, machine.machine_id, machine.gpus, machine.all_gpus)
    return sum(map(bool, found))


def _is_of(machine: Machine, host: Iterable[Machine]) -> bool:
    return not any(machine.is_other(known) for known in host)


def _label(name: str, place: int, hosts: Sequence[Sequence[Machine]]) -> str:
    if len(hosts) == 1:
        return name
    gpus = sorted(gpu for machine in hosts[place] for gpu in machine.gpus)
    boots = sorted(machine.boot for machine in hosts[place] if machine.boot)
    if gpus:
        return f"{name} with {gpus[0][:8]}"
    return f"{name}, boot {boots[0][:4]}" if boots else f"{name} ({place + 1})"
