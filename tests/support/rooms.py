"""Rooms and floors, from the code's imports: ``python tests/support/rooms.py`` prints them.

A room is a folder with modules. An arrow leads from a room to one that its modules import from, at
their top or inside a function. A room's floor is one more than the highest that it imports from.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("harness", "kernels", "models", "parallel")


@dataclass(kw_only=True, slots=True)
class House:
    """The rooms of one top-level folder."""

    rooms: dict[str, str] = field(default_factory=dict)
    """The first line of each room's ``__init__``."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Modules in each room."""
    arrows: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """Imports between rooms: room -> room -> ``importer -> imported`` of every import."""
    strangers: list[str] = field(default_factory=list)
    """Imports of private modules (``_name``) from outside their room."""

    def cycles(self) -> list[str]:
        """Rooms that can reach themselves, in words."""
        found = []
        for room in self.arrows:
            seen, todo = set(), list(self.arrows[room])
            while todo:
                if (other := todo.pop()) not in seen:
                    seen.add(other)
                    todo += self.arrows.get(other, {})
            if room in seen:
                found.append(f"{room} imports from {sorted(self.arrows[room])}, which lead back")
        return found

    def floor(self, room: str) -> int:
        """The floor of a room that no cycle can be reached from."""
        return 1 + max((self.floor(other) for other in self.arrows.get(room, ())), default=0)


def house(package: str) -> House:
    """Read every module of a top-level folder."""
    modules = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(part for part in parts if part != "__init__")] = path
    found = House()
    for name, path in modules.items():
        room = path.parent.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.sizes[room] = found.sizes.get(room, 0) + (path.name != "__init__.py")
        if path.name == "__init__.py":
            found.rooms[room] = (ast.get_docstring(tree) or "").partition("\n")[0]
        # The top folder's own __init__ gathers what users import, and __main__ starts a command.
        if name == package or path.name == "__main__.py":
            continue
        for other in _imported(tree, set(modules)):
            place = modules[other].parent.relative_to(ROOT).as_posix()
            if place != room and other != package:
                found.arrows.setdefault(room, {}).setdefault(place, []).append(f"{name} -> {other}")
                if modules[other].name.startswith("_") and modules[other].name != "__init__.py":
                    found.strangers.append(f"{name} imports {other}")
    return found


def _imported(tree: ast.Module, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules


def main() -> None:
    for package in PACKAGES:
        built = house(package)
        arrows = sum(map(len, built.arrows.values()))
        print(
            f"{package}: {len(built.sizes)} rooms, {arrows} arrows, cycles: {len(built.cycles())}"
        )
        if not built.cycles():
            for room in sorted(built.sizes, key=lambda room: (built.floor(room), room)):
                print(f"  floor {built.floor(room)}  {room} ({built.sizes[room]})")


if __name__ == "__main__":
    main()
