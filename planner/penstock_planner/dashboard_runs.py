"""TensorBoard's event files: one run per curve, because TensorBoard colours and names the curves of a chart by run.

A run is named after its charts and its curve, such as ``replicas/ready``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName, Status
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

FLUSH_S = 5.0
"""Real seconds between two flushes of the files. Chosen: TensorBoard reads them every 30 s."""

NOTES = "planner"
"""Name of the run that holds texts, pictures and the layout of the charts."""

FLAT_FRACTION = 0.001
"""Change of a curve, as a fraction of the largest value of its chart so far, up to which the curve counts as flat.
Chosen: no eye sees it."""

FLAT_POINTS = 20
"""Number of points that are written when a curve becomes flat; after them, one of as many is written. Chosen: eight quiet
hours are then 140 points, and a burst of five minutes is 25, well above the 5% at each end that TensorBoard ignores when it
chooses a chart's range. Points are 12 s apart at the default interval."""

Point = tuple[float, float, int]
"""Value, real seconds since 1970, and step of one point."""


class FlatParts:
    """Leaves out most points of the flat parts of curves, so that a quiet night does not hide a burst.

    TensorBoard crops a chart to the range between the 5th and the 95th percentile of its points. After hours without
    load nearly all points would be equal. A line through the points that remain looks the same. This class does no I/O.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, str], tuple[float, int]] = {}
        self._left_out: dict[tuple[str, str], Point] = {}
        self._largest: dict[str, float] = {}

    def add(self, curve: str, tag: str, point: Point) -> list[Point]:
        """Return the points of a curve that must be written now that ``point`` is its newest, oldest first.

        Empty if ``point`` is left out, because it continues a flat part. If ``point`` ends a flat part, the last point
        that was left out comes before it, so that the line stays flat up to there. Otherwise the result is ``point``.

        Args:
            curve: Name of the curve.
            tag: Tag of its chart.
            point: The newest point of the curve.
        """
        key, value = (curve, tag), point[0]
        largest = self._largest[tag] = max(abs(value), self._largest.get(tag, 0.0))
        before = self._left_out.pop(key, None)
        level, count = self._flat.get(key, (math.inf, 0))
        if abs(value - level) > FLAT_FRACTION * largest:
            self._flat[key] = (value, 0)
            return [point] if before is None else [before, point]
        self._flat[key] = (level, count + 1)
        if count >= FLAT_POINTS and count % FLAT_POINTS:
            self._left_out[key] = point
            return []
        return [point]

    def rest(self) -> list[tuple[str, str, Point]]:
        """Return the points to write at the end of the run, so that flat curves reach the end: (curve, tag, point).

        They are the newest point of each curve, for those curves whose newest point was left out.
        """
        return [(*key, point) for key, point in self._left_out.items()]


def run_of(curve: str, tag: str) -> str:
    """Return the name of the TensorBoard run that draws a curve: the first part of the chart's tag, "/" and the curve.

    Example: the curve ``ready`` in the chart ``replicas/decode`` is drawn by the run ``replicas/ready``.

    Args:
        curve: Name of the curve. If it is empty, the result is empty too, which is the run of the folder itself.
        tag: Tag of the chart, such as ``replicas/decode``; charts with the same first part share their runs.
    """
    return f"{tag.partition('/')[0]}/{curve}" if curve else ""


class Runs:
    """TensorBoard event files in one folder, one for each run; TensorBoard shows a run as a curve.

    A run's file is created with its first point. The methods take ``wall_s``, the event's time in real seconds since
    1970, and ``step``, its position on the charts' axis in simulated seconds since the planner first started. They
    raise `OSError` if the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, EventsWriter] = {}
        self._flushed_s = float("-inf")
        self._flat = FlatParts()

    def put(self, run: str, content: Summary, *, wall_s: float, step: int) -> None:
        """Write one TensorBoard event (such as a value, text or picture) of a run.

        Args:
            run: Name of the run; empty for the run of the folder itself.
            content: Content of the event.
            wall_s: Time of the event, real seconds since 1970.
            step: Position on the charts' axis, simulated seconds.
        """
        writer = self._writers.get(run)
        if writer is None:
            folder = self._folder / run
            folder.mkdir(parents=True, exist_ok=True)
            writer = self._writers[run] = EventsWriter(str(folder / "events"))
        writer.write_event(Event(wall_time=wall_s, step=step, summary=content))
        if wall_s - self._flushed_s >= FLUSH_S:
            self._flushed_s = wall_s
            for each in self._writers.values():
                each.flush()

    def create(self, runs: Sequence[str], *, wall_s: float) -> None:
        """Create the TensorBoard runs (curves) in the given order by writing a first value of each, which no tab shows.

        TensorBoard sorts and colours runs by the time of their first value. The value written here belongs to a plugin
        that TensorBoard does not have.

        Args:
            runs: Names of the runs.
            wall_s: Present time, real seconds since 1970. The first values get times just before it, a millisecond
                apart.
        """
        data = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="penstock"))
        tensor = TensorProto(dtype="DT_STRING", string_val=[b""], tensor_shape=TensorShapeProto())
        for ahead, run in zip(range(len(runs), 0, -1), runs, strict=True):
            first = Summary.Value(tag="begins", metadata=data, tensor=tensor)
            self.put(run, Summary(value=[first]), wall_s=wall_s - ahead / 1000, step=0)

    def draw(self, found: Mapping[tuple[str, str], float], *, wall_s: float, step: int) -> None:
        """Write one point for each pair of curve and chart, all at the same step; most points of flat parts are left out.

        Args:
            found: Values of the points by (name of the curve, tag of the chart). An empty name means the run of the
                folder itself.
            wall_s: Time of the points, real seconds since 1970.
            step: Position on the charts' axis, simulated seconds.
        """
        by_event: dict[tuple[str, float, int], list[Summary.Value]] = {}
        for (curve, tag), value in found.items():
            for shown, at_s, at_step in self._flat.add(curve, tag, (value, wall_s, step)):
                event = (run_of(curve, tag), at_s, at_step)
                by_event.setdefault(event, []).append(Summary.Value(tag=tag, simple_value=shown))
        for (run, at_s, at_step), values in sorted(by_event.items(), key=lambda each: each[0][1:]):
            self.put(run, Summary(value=values), wall_s=at_s, step=at_step)

    def write_text(self, tag: str, text: str, *, wall_s: float, step: int) -> None:
        """Write a Markdown text for the text tab.

        Args:
            tag: Name under which the tab shows the text.
            text: The text.
            wall_s: Time of the event, real seconds since 1970.
            step: Position on the charts' axis, simulated seconds.
        """
        self.put(NOTES, summary.text(tag, text), wall_s=wall_s, step=step)

    def write_picture(self, tag: str, png: bytes, *, wall_s: float, step: int) -> None:
        """Write a PNG for the images tab.

        Args:
            tag: Name under which the tab shows the picture.
            png: Content of the PNG file.
            wall_s: Time of the event, real seconds since 1970.
            step: Position on the charts' axis, simulated seconds.
        """
        width, height = (
            int.from_bytes(png[at : at + 4]) for at in (16, 20)
        )  # fields of the header chunk, see PNG specification 11.2.2
        image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
        self.put(NOTES, Summary(value=[Summary.Value(tag=tag, image=image)]), wall_s=wall_s, step=step)

    def begin_session(
        self, settings: Mapping[str, str | float], metrics: Sequence[str], *, wall_s: float
    ) -> None:
        """Write a row of TensorBoard's HParams table, which compares runs by their settings.

        Args:
            settings: Settings that the row shows, by name.
            metrics: Tags of charts; the row shows the last point of each in the folder's own run.
            wall_s: Start of the session, real seconds since 1970.
        """
        infos = [
            HParamInfo(
                name=name,
                type=DataType.Value("DATA_TYPE_STRING" if isinstance(value, str) else "DATA_TYPE_FLOAT64"),
            )
            for name, value in settings.items()
        ]
        shown = [MetricInfo(name=MetricName(tag=tag), display_name=tag.rpartition("/")[2]) for tag in metrics]
        start = SessionStartInfo(start_time_secs=wall_s)
        for name, value in settings.items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        experiment = Experiment(hparam_infos=infos, metric_infos=shown)
        self._put_session("experiment", HParamsPluginData(experiment=experiment), wall_s)
        self._put_session("session_start_info", HParamsPluginData(session_start_info=start), wall_s)

    def end_session(self, *, wall_s: float) -> None:
        """Mark the row of TensorBoard's HParams table that `begin_session` wrote as complete.

        Args:
            wall_s: End of the session, real seconds since 1970.
        """
        end = SessionEndInfo(status=Status.Value("STATUS_SUCCESS"), end_time_secs=wall_s)
        self._put_session("session_end_info", HParamsPluginData(session_end_info=end), wall_s)

    def close(self) -> None:
        """Write the newest point of each curve whose value did not change lately, then close the TensorBoard event files.

        While a value stays the same, only some of its points are written; so its last one is still missing here. Disk errors
        are ignored.
        """
        with contextlib.suppress(OSError):
            for curve, tag, (value, wall_s, step) in self._flat.rest():
                content = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
                self.put(run_of(curve, tag), content, wall_s=wall_s, step=step)
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()

    def _put_session(self, name: str, content: HParamsPluginData, wall_s: float) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
        value = Summary.Value(tag=f"_hparams_/{name}", metadata=SummaryMetadata(plugin_data=plugin))
        self.put("", Summary(value=[value]), wall_s=wall_s, step=0)
