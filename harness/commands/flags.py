"""Flags of the command ``attnbench``: Hydra's, told apart from keys that are written like flags.

``--config-dir`` adds a folder of one's own (:mod:`harness.paths`), ``--cfg job`` and ``--help``
print what would be composed, and others are Hydra's own. What has no meaning here is refused in one
line: attnbench has one configuration, and runs every command as a sweep.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import OmegaConf

from harness import __version__
from harness.cases.sweep import load_sweep
from harness.paths import CONF, add_own_folder
from harness.request.choices import require_choice_of_group
from harness.request.command_line import parse
from harness.request.compose import scale_of
from harness.request.config import GROUPS, RUN_KEYS
from harness.request.config_store import compose_config, store_everything
from harness.request.help import help_text, template

_SWEEPS_ALREADY = ("-m", "--multirun", "-r", "--run")
"""Every command is a sweep, of one case or of many."""

_REFUSED = {
    "config_name": "attnbench has one configuration; add files to it with --config-dir DIR",
    "config_path": "attnbench has one configuration; add files to it with --config-dir DIR",
    "experimental_rerun": "write the command again; it goes on where it ended",
}


def without_own_folders(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Use the folders that ``--config-dir`` names; returns what else was typed, and these flags.

    Raises ValueError in one line for a folder that is missing.
    """
    kept, used, rest = [], [], iter(arguments)
    for item in rest:
        flag, equals, folder = item.partition("=")
        if flag not in ("-cd", "--config-dir"):
            kept.append(item)
            continue
        folder = folder if equals else next(rest, "")
        if not folder or folder.startswith("-"):
            raise ValueError(f"{flag}: must be followed by a folder")
        add_own_folder(folder)
        used.append(f"--config-dir={folder}")
    return [item for item in kept if item not in _SWEEPS_ALREADY], used


def run_flags(arguments: Sequence[str]) -> None:
    """Carry out a command line with flags. ValueError in one line for what it cannot mean."""
    if "--version" in arguments:
        # Takes a while to load, for a number that no other command shows.
        from importlib import metadata

        print(f"attnbench {__version__} (Hydra {metadata.version('hydra-core')})")
        return
    parser = get_args_parser()
    parser.error = _refuse
    flags, unknown = parser.parse_known_args(list(arguments))
    if "--" in arguments:
        raise ValueError("--: marks the end of flags, which needs no mark here; leave it out")
    if mistakes := [item for item in unknown if item.startswith("-")]:
        raise ValueError(_no_such_flag(mistakes[0], arguments))
    for name, instead in _REFUSED.items():
        if getattr(flags, name):
            raise ValueError(f"--{name.replace('_', '-')}: {instead}")
    if flags.shell_completion and not any("=" in item for item in flags.overrides):
        raise ValueError("--shell-completion: write --shell-completion install=bash, zsh or fish")
    if flags.hydra_help or flags.shell_completion or _asks_hydra(flags):
        _leave_to_hydra()
    elif flags.help:
        print(help_text(flags.overrides, resolve=flags.resolve))
    elif flags.cfg == "job":
        print(configuration(flags.overrides, flags.package, resolve=flags.resolve), end="")
    elif flags.cfg or flags.info:
        _require_one_configuration(flags.overrides, "--cfg" if flags.cfg else "--info")
        _leave_to_hydra()
    else:
        raise ValueError(
            f"{_first_flag(arguments)}: goes with --cfg job; leave it out to run cases"
        )


def configuration(overrides: Sequence[str], package: str | None, *, resolve: bool) -> str:
    """The composed configuration as YAML; of a sweep, its grids and what they leave open."""
    typed = parse(overrides)
    names = typed.pop("sweeps", [None])
    if len(names) != 1:
        raise ValueError("--cfg job: shows one configuration; give sweeps one value")
    (name,) = names
    kept = [item for item in overrides if item.partition("=")[0] != "sweeps"]
    _require_one_configuration(kept, "--cfg job")
    config: Any = compose_config(kept)
    if package:
        config = _part(config, package)
    composed = OmegaConf.to_yaml(config, resolve=resolve)
    if name is None:
        return composed
    sweep = load_sweep(str(name))
    scale = scale_of(sweep, compose_config(kept))
    fixed = {key: values[0] for key, values in typed.items() if key not in RUN_KEYS}
    grids = [{**grid, **fixed} for grid in sweep.scales[scale]]
    return (
        f"# sweeps={name}, scale {scale}: each grid stands for all combinations of its values.\n"
        f"{yaml.safe_dump(grids, sort_keys=False, default_flow_style=None)}"
        f"# What a grid does not name:\n{composed}"
    )


def _part(config: Any, package: str) -> Any:
    """A part of the configuration, such as ``model``; ValueError for what is none."""
    try:
        part = OmegaConf.select(config, package, throw_on_missing=True)
    except Exception as error:
        raise ValueError(f"--package {package}: {str(error).splitlines()[0]}") from error
    if part is None:
        raise ValueError(f"--package {package}: no such part of the configuration")
    if not OmegaConf.is_config(part):
        raise ValueError(
            f"--package {package}: is the value {part} and no part; leave out the last name"
        )
    return part


def _require_one_configuration(overrides: Sequence[str], flag: str) -> None:
    for key, values in parse(overrides).items():
        if len(values) > 1:
            raise ValueError(f"{flag}: shows one configuration; give {key} one value")
        if key in GROUPS:
            require_choice_of_group(key, str(values[0]))
    compose_config(overrides)


def _refuse(message: str) -> NoReturn:
    """What argparse says of a flag's value, in place of its usage and an exit."""
    raise ValueError(message.removeprefix("argument "))


def _asks_hydra(flags: Namespace) -> bool:
    """Whether help is wanted of Hydra's own settings."""
    return bool(flags.help) and any(
        item.lstrip("+~").startswith("hydra") for item in flags.overrides
    )


def _leave_to_hydra() -> None:
    store_everything(template())
    main = hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
    main(_nothing_to_run)()


def _nothing_to_run(config: object) -> None:
    raise ValueError("leave the flag out to run cases")


def _first_flag(arguments: Sequence[str]) -> str:
    return next(item for item in arguments if item.startswith("-"))


def _no_such_flag(item: str, arguments: Sequence[str]) -> str:
    """The error for a key that is written with dashes, like another program's flag."""
    flag, _, value = item.partition("=")
    following = list(arguments)[list(arguments).index(item) + 1 :][:1]
    if not value and following and "=" not in following[0] and not following[0].startswith("-"):
        value = following[0]
    return f"{flag}: no such flag; write {flag.lstrip('-') or 'KEY'}={value or 'VALUE'}"
