"""Folders of the project's configurations and sweeps."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or the folder that packages are installed in."""
CONF = ROOT / "conf"
SWEEPS = ROOT / "sweeps"
