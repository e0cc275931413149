"""TensorBoard's event files: one run per curve, because TensorBoard colours and names the curves of a chart by run."""

from __future__ import annotations

import contextlib
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
        """Create the runs in this order, since TensorBoard sorts and colours runs by the time of their first value.

        The first value that is written belongs to a plugin that TensorBoard does not have, so no tab shows it.

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
        """Write one point for each pair of curve and chart, all at the same step.

        Args:
            found: Values of the points by (name of the curve's run, tag of the chart).
            wall_s: Time of the points, real seconds since 1970.
            step: Position on the charts' axis, simulated seconds.
        """
        by_run: dict[str, list[Summary.Value]] = {}
        for (curve, tag), value in found.items():
            by_run.setdefault(curve, []).append(Summary.Value(tag=tag, simple_value=value))
        for run, values in by_run.items():
            self.put(run, Summary(value=values), wall_s=wall_s, step=step)

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
        """Flush and close the TensorBoard event files; disk errors are ignored."""
        for writer in self._writers.values():
            with contextlib.suppress(OSError):
                writer.close()

    def _put_session(self, name: str, content: HParamsPluginData, wall_s: float) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="hparams", content=content.SerializeToString())
        value = Summary.Value(tag=f"_hparams_/{name}", metadata=SummaryMetadata(plugin_data=plugin))
        self.put("", Summary(value=[value]), wall_s=wall_s, step=0)
