"""Folders of configurations and sweeps: the project's, and those that a user adds.

A user's folder has the same folders as ``conf/`` (``model/``, ``launcher/``, ``hardware/``, ...)
and ``sweeps/``; any of them may be missing. It is named with ``--config-dir``, in the variable
ATTNBENCH_CONFIG, or is called ``attnbench_conf`` and lies in the working folder.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the folder that packages are installed in."""
CONF = ROOT / "conf"
SWEEPS = ROOT / "sweeps"

CONFIG_VARIABLE = "ATTNBENCH_CONFIG"
"""Folders of one's own, separated as in PATH; worker processes inherit it."""
BESIDE = "attnbench_conf"
"""The name of a folder of one's own that is found in the working folder."""


def add_own_folder(folder: str) -> None:
    """Use a folder of one's own, here and in the processes that are started.

    Raises ValueError in one line if there is no such folder.
    """
    given = os.environ.get(CONFIG_VARIABLE, "")
    path = Path(folder).expanduser().absolute()
    _require_folder(path, f"--config-dir {folder}")
    os.environ[CONFIG_VARIABLE] = os.pathsep.join(filter(None, (str(path), given)))


def own_folders() -> list[Path]:
    """Folders of the user's own, in the order in which they were named.

    Raises ValueError in one line if one of them is missing.
    """
    named = filter(None, os.environ.get(CONFIG_VARIABLE, "").split(os.pathsep))
    found = [Path(folder).expanduser().absolute() for folder in named]
    for folder in found:
        _require_folder(folder, f"{CONFIG_VARIABLE}={folder}")
    beside = Path.cwd() / BESIDE
    if beside.is_dir():
        found.append(beside)
    return list(dict.fromkeys(found))


def config_files(group: str) -> dict[str, Path]:
    """The YAML files of a group of ``conf/``, or of ``sweeps``, by their names without suffix.

    Raises ValueError in one line if two files have one name.
    """
    project = SWEEPS if group == "sweeps" else CONF / group
    return _by_name([project, *(folder / group for folder in own_folders())])


def project_sweeps() -> list[str]:
    """Names of the sweeps that come with the project, sorted."""
    return sorted(_by_name([SWEEPS]))


def _by_name(folders: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.yaml")):
            if path.stem in found:
                raise ValueError(
                    f"{path}: its name is taken by {found[path.stem]}; give it another"
                )
            found[path.stem] = path
    return found


def _require_folder(path: Path, where: str) -> None:
    if not path.is_dir():
        raise ValueError(f"{where}: no such folder; it holds model/, sweeps/, launcher/ and others")
