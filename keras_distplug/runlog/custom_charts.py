"""Layouts of TensorBoard's "Custom Scalars" dashboard.

A layout is written together with the first scalars that it shows, so that the dashboard has no
empty charts. TensorBoard merges the layouts of all runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars

from keras_distplug.runlog.event_files import EventFiles

GOODPUT: Mapping[str, str] = {
    "goodput": "goodput/.*",
    "where the time went": "time/.*",
}


def write_layout(files: EventFiles, category: str, charts: Mapping[str, str]) -> None:
    """Writes a layout, in a file that is complete before the next one starts.

    Args:
        files: The event files of one of TensorBoard's runs.
        category: The title of a group of charts.
        charts: Regular expressions that match the tags of a chart, by the chart's title.
    """
    made = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"^{tags}$"]))
        for title, tags in charts.items()
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title=category, chart=made)])
    metadata = custom_scalars.create_summary_metadata()
    files.add_alone(custom_scalars.CONFIG_SUMMARY_TAG, metadata, layout.SerializeToString())
