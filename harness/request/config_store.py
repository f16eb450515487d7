"""Composes configurations with Hydra from a ConfigStore that holds only what each one needs.

Hydra copies its whole store for every group that it looks at, so a full store makes it slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from harness.paths import CONF, config_files, own_folders
from harness.request.choices import REGISTRIES, default_choice, options
from harness.request.config import Config, group_of


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """The configuration that Hydra composes. ValueError in one line for what it refuses."""
    _store_schema()
    changed = {group_of(override.partition("=")[0]) for override in overrides}
    for group, registry in REGISTRIES.items():
        # A file may build on any registered choice of its group.
        _store_choices(group, registry.names() if group in changed else [default_choice(group)])
    if "sweeps" in changed:
        _store_sweeps()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(config_name="config", overrides=[*overrides, *_search_path()])
    except (HydraException, OmegaConfBaseException) as error:
        where = overrides[0] if overrides else "config.yaml"
        raise ValueError(f"conf: {where}: {str(error).strip().splitlines()[0]}") from error
    except YAMLError as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"conf: {overrides[0]}: not valid YAML: {problem}") from error


def _search_path() -> list[str]:
    """Hydra's override that lets it find the files in folders of the user's own."""
    folders = own_folders()
    if not folders:
        return []
    quoted = ",".join(f"'file://{str(folder).translate(_ESCAPED)}'" for folder in folders)
    return [f"hydra.searchpath=[{quoted}]"]


_ESCAPED = str.maketrans({"'": "\\'"})


def store_everything(help_template: str) -> None:
    """Tell Hydra all that can be chosen, for its own flags."""
    _store_schema()
    _store_help(help_template)
    _store_sweeps()
    for group, registry in REGISTRIES.items():
        _store_choices(group, registry.names())


@cache
def _store_schema() -> None:
    ConfigStore.instance().store(name="schema", node=Config)
    _store_help("")


def _store_help(template: str) -> None:
    node = {"app_name": "attnbench", "header": "", "footer": "", "template": template}
    ConfigStore.instance().store(group="hydra/help", name="attnbench", node=node)


def _store_sweeps() -> None:
    """Named sweeps are read by harness.cases.sweep; this lets Hydra's flags accept their names."""
    for name in config_files("sweeps"):
        ConfigStore.instance().store(group="sweeps", name=name, node={}, package="_global_")


def _store_choices(group: str, names: Iterable[str]) -> None:
    for name in names:
        _store_choice(group, name)


@cache
def _store_choice(group: str, name: str) -> None:
    # A default may be a file.
    if name in REGISTRIES[group]:
        node = options(group, name)
        ConfigStore.instance().store(group=group, name=name, node=node)
