"""Keeps a file of Prometheus targets true: every process of the local graphs, labelled as the chart's PodMonitor does.

python prometheus_targets.py targets.json
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def targets(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what `penstock status --json` says as Prometheus reads it."""
    graph = {"namespace": "local", "graph": status["namespace"]}
    return [
        {
            "targets": [each["url"].removeprefix("http://")],
            "labels": {**graph, "pod": each["name"], "pod_role": each["role"]},
        }
        for each in status["processes"]
        if each["url"]
    ]


def main() -> None:
    """Write the file every five seconds."""
    file, penstock = Path(sys.argv[1]), shutil.which("penstock") or sys.exit("penstock: not on PATH")
    while True:
        status = subprocess.run([penstock, "status", "--json"], capture_output=True, check=False)  # noqa: S603 - what its user runs
        found = targets(json.loads(status.stdout)) if status.returncode == 0 else []
        new = file.with_suffix(".new")
        new.write_text(json.dumps(found))
        new.replace(file)
        time.sleep(5)


if __name__ == "__main__":
    main()
