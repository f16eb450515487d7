"""Text and labels of figures: no clashes of names, no label over data, no figure without data.

What each figure draws is tested beside the table of the same part.
"""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox
from records import (
    decode_examples,
    make_record,
    make_split_record,
    make_strategy_record,
    profile_examples,
)

from harness.analysis.frame import build_frame
from harness.drawing.line_labels import label_line_ends
from harness.render.figure import (
    FIGURES,
    CaptionedFigure,
    build_figure,
    describe,
    wrap_titles,
)
from harness.render.palette import colour, marker
from harness.render.roof import draw_roof
from harness.store.record import Record
from kernels.backend import BACKENDS
from parallel.strategies.strategy import STRATEGIES


def built(name: str, records: list[Record]) -> CaptionedFigure:
    found = build_figure(name, build_frame(records))
    assert found is not None
    return found


def looks(names: list[str]) -> list[tuple[str, str]]:
    return [(colour(name), marker(name)) for name in names]


class TestColours:
    def test_no_two_strategies_look_alike(self) -> None:
        declared = looks(list(STRATEGIES.given("look")))
        tints, marks = zip(*declared, strict=True)
        assert len(set(tints)) == len(set(marks)) == len(declared) >= 12
        found = looks(STRATEGIES.names())
        assert len(set(found)) == len(found)

    def test_no_two_backends_look_alike(self) -> None:
        """There are more of them than colours that all can tell apart."""
        found = looks(BACKENDS.names())
        assert len(set(found)) == len(found) > 20


def samples(figure: Figure) -> dict[str, tuple[str, Any]]:
    """Label to (line style of its sample, whether a leader runs to it)."""
    found = {}
    for axis in figure.get_axes():
        boxes = [item for item in axis.get_children() if isinstance(item, AnnotationBbox)]
        labels = {text.xy[1]: text.get_text() for text in axis.texts}  # type: ignore[attr-defined]
        for box in boxes:
            (line,) = box.offsetbox.get_children()
            found[labels[box.xybox[1]]] = (line.get_linestyle(), box.arrow_patch is not None)
    return found


class TestLabels:
    def figure(self, ends: dict[str, tuple[int, float]]) -> Figure:
        figure = Figure(layout="constrained")
        axis = figure.subplots()
        styles = itertools.cycle(["-", "--"])
        lines = [
            axis.plot([0, x], [0, y], next(styles), marker="o", label=name)[0]
            for name, (x, y) in ends.items()
        ]
        axis.set_ylim(bottom=0)
        label_line_ends(axis, lines, 3.0)
        figure.draw_without_rendering()
        return figure

    def test_samples_show_the_style_and_early_ends_lead_nowhere(self) -> None:
        figure = self.figure({"whole": (4, 1.0), "early": (2, 0.5), "other": (4, 0.1)})
        assert samples(figure) == {
            "whole": ("-", True),
            "early": ("--", False),
            "other": ("-", True),
        }

    def test_labels_stand_clear_of_the_axes_and_of_each_other(self) -> None:
        figure = self.figure({f"line {index}": (4, index / 1000) for index in range(8)})
        (axis,) = figure.get_axes()
        boxes = sorted((text.get_window_extent() for text in axis.texts), key=lambda box: box.y0)
        assert len(boxes) == 8
        assert all(box.x0 > axis.bbox.x1 for box in boxes)
        assert boxes[0].y0 > axis.bbox.y0
        middles = [(box.y0 + box.y1) / 2 for box in boxes]
        gaps = [above - below for below, above in itertools.pairwise(middles)]
        assert min(gaps) > 0.75 * boxes[0].height


@pytest.mark.parametrize("lowest", [0.1, 100.0, 3000.0])
def test_words_of_a_roof_stand_where_no_kernel_can_be(lowest: float) -> None:
    figure = Figure(figsize=(4.0, 3.0))
    axis = figure.subplots()
    axis.set(xscale="log", yscale="log")
    peak, bandwidth = 989.4, 4800.0
    axis.set_xlim(*draw_roof(axis, peak, bandwidth, lowest, 5000.0))
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axis.texts]
    assert len(boxes) == 2
    assert not boxes[0].overlaps(boxes[1])
    for box in boxes:
        right, bottom = axis.transData.inverted().transform((box.x1, box.y0))
        assert bottom > min(peak, right * bandwidth / 1e3)
        assert box.x0 > axis.bbox.x0


def test_the_memory_to_be_filled_is_labelled() -> None:
    figure = built("kv_memory", decode_examples()).figure
    (label,) = [label for label in samples(figure) if label.endswith(" GiB")]
    (limit,) = [line for line in figure.get_axes()[0].lines if line.get_label() == label]
    assert float(label.removesuffix(" GiB")) == pytest.approx(limit.get_ydata()[0], rel=0.01)
    assert limit.get_linestyle() == samples(figure)[label][0] == "--"


def test_a_model_with_latents_is_named() -> None:
    def record(name: str, **options: Any) -> Record:
        found = make_record(
            attention=name,
            samples_ms={"prefill": [[20.0]], "decode": [[5.0]]},
            notes={
                "generate": {"copy_bandwidth_gb_s": 4000.0, "kernels": 300.0, "launches": 300.0}
            },
        )
        found.case["task"] = {"name": "generate", "output_len": 3, "lengths": "equal"}
        found.case["cache"] = {"name": "contiguous"}
        found.case["model"] |= {"kv_lora_rank": None, **options}
        found.case_id = f"generate-{name}"
        return found

    def names(*records: Record) -> tuple[str, list[str]]:
        found = built("generate", list(records))
        (axis,) = found.figure.get_axes()
        return found.caption, [label.get_text() for label in axis.get_yticklabels()]

    plain, latent = record("sdpa"), record("mla_absorbed", kv_lora_rank=32)
    caption, labels = names(plain, latent)
    assert "model small" not in caption
    assert "mla_absorbed, contiguous, small(kv_lora_rank=32)" in labels
    latent.case["cache"] = {"name": "latent"}
    caption, labels = names(plain, latent)
    assert labels == ["mla_absorbed, latent64", "sdpa, contiguous"]
    assert "small over contiguous caches; small(kv_lora_rank=32) over latent64 caches." in caption
    caption, labels = names(plain)
    assert "model small" in caption
    assert labels == ["sdpa, contiguous"]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_timeline_says_whose_shares_they_are(device: str) -> None:
    record = make_strategy_record("ddp_torch", ms=5.0, bucket_size_mb=25)
    record.case["device"] = device
    found = built("ddp_timeline", [record])
    (axis,) = found.figure.get_axes()
    assert "; busiest rank: " in axis.get_title("left")
    assert ("NCCL" in found.caption) == (device == "cuda")


@pytest.mark.parametrize("name", FIGURES.names())
def test_nothing_is_drawn_of_what_is_unsupported(name: str) -> None:
    fields: dict[str, Any] = {"status": "unsupported", "message": "not installed"}
    records = [
        make_record(attention="flash_attn_4", seq_len=seq_len, task=task, **fields)
        for seq_len in (512, 1024)
        for task in ("train_step", "attention")
    ]
    kinds = [*decode_examples(), *profile_examples()]
    kinds += [make_split_record("zigzag", ms=4.0), make_strategy_record("ddp_torch", ms=5.0)]
    for record in kinds:
        record.status, record.error = "unsupported", {"message": "not installed"}
        record.phases, record.notes = {}, {}
    for group in (records, kinds):
        assert build_figure(name, build_frame(group)) is None


@pytest.mark.parametrize("num_columns", [1, 2, 3])
@pytest.mark.parametrize(
    "words",
    [
        "sequence length 16,384, batch 32, heads 128 of 128, rank 512 + 64, latent64 cache",
        # Broken by its mean width alone, a line of it is too wide.
        "model medium, sequence length 32,768, batch 1, bf16, 2 ranks, little illicit",
    ],
)
def test_titles_stay_above_their_panels(num_columns: int, words: str) -> None:
    drawing = Figure(figsize=(10, 3), layout="constrained")
    panels = drawing.subplots(1, num_columns, squeeze=False)[0]
    for axes in panels:
        axes.set_title(words)
        axes.set_yticks([0], ["a label that moves the middle"])
    wrap_titles(drawing)
    drawing.draw_without_rendering()
    column = drawing.bbox.width / num_columns
    for place, axes in enumerate(panels):
        extent = axes.title.get_window_extent()
        assert place * column <= extent.x0
        assert extent.x1 <= (place + 1) * column
        assert " ".join(axes.get_title().split()) == words
        assert ("\n" in axes.get_title()) == (num_columns > 1)


def test_a_panel_does_not_say_what_is_usual() -> None:
    """Values as wide as keys, and a key head for each query head."""
    names = ["head_dim", "value_dim", "num_heads", "num_kv_heads"]
    usual = pd.Series({"head_dim": 64, "value_dim": 64, "num_heads": 8, "num_kv_heads": 8})
    assert describe(usual, names) == "head_dim 64, 8 heads"
    latent = pd.Series({"head_dim": 192, "value_dim": 128, "num_heads": 8, "num_kv_heads": 2})
    assert describe(latent, names) == "head_dim 192, values of 128 columns, 8 heads, 2 KV heads"
