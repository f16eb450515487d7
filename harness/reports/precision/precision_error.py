"""How far the loss and the gradients of each precision are from those of float64."""

from __future__ import annotations

from typing import Any

import pandas as pd

from harness.cases import format as fmt
from harness.render.table import Column, Table, finding, make_table, table
from harness.reports.precision.audit_rows import UNUSED, audits, relative_error, tensors_of, total
from harness.sentences.findings import sentence

CAPTION = (
    "One training step against the same in float64. Errors are relative, of gradients in the "
    "Euclidean norm: of all parameters together, and of the worst one. Overflow: elements that "
    "became infinite or NaN, in the outputs of layers and in gradients. Underflow: elements of "
    "gradients, those that pass through the layers included, that became zero and are not. "
    "Skipped steps: how often gradient scaling met an overflow and halved its scale, before the "
    "step that is shown."
)


@table("precision_error")
def build(frame: pd.DataFrame) -> Table | None:
    rows = audits(frame)
    if rows.empty:
        return None
    found = pd.DataFrame([_errors(audit) for audit in rows["audit"]], index=rows.index)
    return make_table(
        caption=CAPTION,
        rows=rows.drop(columns=["loss"]).join(found),
        lead=["model", "attention", "precision"],
        keep=["model", "precision"],
        without=UNUSED,
        metrics=[
            Column(key="loss", header="loss (nats)", format=_six_digits),
            Column(key="loss_error", header="loss error", format=fmt.scientific),
            Column(key="gradient_error", header="gradient error", format=fmt.scientific),
            Column(key="worst_error", header="worst parameter's", format=fmt.scientific),
            Column(key="worst", header="worst parameter", detail=True),
            Column(key="overflowed", header="overflow", format=fmt.integer),
            Column(key="underflowed", header="underflow", format=fmt.integer),
            Column(key="loss_scale", header="loss scale", format=fmt.integer),
            Column(key="skipped_steps", header="skipped steps", format=fmt.integer, detail=True),
        ],
    )


@finding("precision_error")
def say(rows: pd.DataFrame) -> str | None:
    error = rows["gradient_error"].groupby(rows["precision"]).median().sort_values()
    if len(error) < 2:
        return None
    scientific = fmt.scientific
    return sentence(
        f"gradients are closest to float64 with {error.index[0]} ({scientific(error.iloc[0])}, "
        f"median) and farthest with {error.index[-1]} ({scientific(error.iloc[-1])})"
    )


def _errors(audit: dict[str, Any]) -> dict[str, Any]:
    gradients = tensors_of(audit, "gradient")
    passing = tensors_of(audit, "output_gradient")
    loss, exact = audit["loss"], audit["loss_float64"]
    by_parameter = {tensor["name"]: relative_error([tensor]) for tensor in gradients}
    worst = max(by_parameter, key=lambda name: by_parameter[name])
    return {
        "loss": float("nan") if loss is None else loss,
        "loss_error": float("inf") if loss is None else abs(loss - exact) / abs(exact),
        "gradient_error": relative_error(gradients),
        "worst_error": by_parameter[worst],
        "worst": worst,
        "overflowed": total([*tensors_of(audit, "output"), *passing, *gradients], "overflowed"),
        "underflowed": total([*passing, *gradients], "underflowed"),
        "loss_scale": audit["loss_scale"],
        "skipped_steps": audit["skipped_steps"],
    }


def _six_digits(value: float) -> str:
    return f"{value:.6g}"
