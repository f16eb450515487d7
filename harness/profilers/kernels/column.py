"""The frame's column for kernel profiles of either tool."""

from __future__ import annotations

from harness.cases.column import CaseColumn, note

KERNEL_PROFILE = CaseColumn(name="kernel_profile", read=note("kernel_profile"))
