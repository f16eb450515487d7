"""Fills Hydra's ConfigStore with the schema, every registered choice, and the help text."""

from __future__ import annotations

from functools import cache

from hydra.core.config_store import ConfigStore

from harness.paths import SWEEPS
from harness.request.config import Config, registered_choices
from harness.request.help import template


@cache
def fill_config_store() -> None:
    """Tell Hydra what can be chosen; called before composing or showing help."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, nodes in registered_choices().items():
        for name, node in nodes.items():
            store.store(group=group, name=name, node=node)
    for path in SWEEPS.glob("*.yaml"):
        # Named sweeps are read by harness.cases.sweep; this lets Hydra's flags accept their names.
        store.store(group="sweeps", name=path.stem, node={}, package="_global_")
    help_node = {"app_name": "attnbench", "header": "", "footer": "", "template": template()}
    store.store(group="hydra/help", name="attnbench", node=help_node)
