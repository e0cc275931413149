"""Record what a vLLM pair shows on the wire: metric names, types, labels and buckets, and the fields of answers.

    python tests/real/record_surface.py http://PREFILL http://DECODE > tests/contract/data/vllm-VERSION.json

The recording holds names only, no values, except for the closed sets `reason` and `finished_reason`.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

CLOSED = ("reason", "finished_reason")
PROMPT = {"prompt": "The gate lets through what the turbine can use.", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
KV = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Return status and text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def families(page: str) -> dict[str, Any]:
    """Return type, label names, bucket bounds and closed sets of values by metric."""
    found: dict[str, Any] = {}
    for family in text_string_to_metric_families(page):
        if not family.name.startswith("vllm:") or family.name.endswith("_created"):
            continue
        entry: dict[str, Any] = {"type": family.type, "labels": set(), "buckets": []}
        for sample in family.samples:
            labels = dict(sample.labels)
            if (bound := labels.pop("le", None)) is not None and bound not in entry["buckets"]:
                entry["buckets"].append(bound)
            entry["labels"] |= labels.keys()
            for name in CLOSED:
                if name in labels:
                    entry.setdefault(name, set()).add(labels[name])
        found[family.name] = {
            key: sorted(value) if isinstance(value, set) else value for key, value in entry.items() if value
        }
    return found


def shape(value: Any) -> Any:
    """Return the names of fields, without their values; of a list, the shape of its first item."""
    if isinstance(value, dict):
        return {key: shape(each) for key, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None


def events(text: str) -> list[Any]:
    """Return the shapes of a stream's events, equal neighbours once."""
    shapes: list[Any] = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            one = shape(json.loads(line[6:]))
            if not shapes or shapes[-1] != one:
                shapes.append(one)
    return shapes


def record(prefill: str, decode: str) -> dict[str, Any]:
    """Return what two workers show."""
    completions, chats = "/v1/completions", "/v1/chat/completions"
    long = {**PROMPT, "max_tokens": 10**9}
    return {
        "metrics": families(fetch(decode + "/metrics")[1]),
        "completion": shape(json.loads(fetch(decode + completions, PROMPT)[1])),
        "chat": shape(json.loads(fetch(decode + chats, CHAT)[1])),
        "completion_events": events(fetch(decode + completions, {**PROMPT, **USAGE})[1]),
        "chat_events": events(fetch(decode + chats, {**CHAT, **USAGE})[1]),
        "prefill": shape(json.loads(fetch(prefill + completions, {**PROMPT, **KV, "max_tokens": 1})[1])),
        "models": shape(json.loads(fetch(decode + "/v1/models")[1])),
        "errors": {
            name: [status, shape(json.loads(text))]
            for name, (status, text) in {
                "unknown_model": fetch(decode + completions, {**PROMPT, "model": "nope"}),
                "too_many_tokens": fetch(decode + completions, long),
                "no_json": fetch(decode + completions, {"max_tokens": "x"}),
            }.items()
        },
    }


def main(prefill: str, decode: str) -> None:
    """Print the recording, one part a line."""
    version = json.loads(fetch(decode + "/version")[1])["version"]
    parts = {"version": version, **record(prefill, decode)}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in parts.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: record_surface.py http://PREFILL http://DECODE")
    main(sys.argv[1], sys.argv[2])
