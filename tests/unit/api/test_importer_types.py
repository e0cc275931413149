import copy
from pathlib import Path

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidSpecError
from penstock.runtimes.dynamo.importer import import_dgd

FOLDER = Path(__file__).parents[3] / "manifests/import"
EXAMPLES = [next(yaml.safe_load_all(each.read_text())) for each in sorted(FOLDER.glob("*.yaml"))]
WORDS = ["", "sh", "-c", "python3", "-m", "dynamo.vllm", "--model", "$X", "0", "gpu", "prefill", "${A}", "{"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """Every key and item of a manifest, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


@settings(max_examples=50)
@given(st.data())
def test_any_value_at_any_place_is_converted_or_refused(data):
    """A deployment with other values at up to three of its keys ends in a graph, or in problems with their file."""
    manifest = copy.deepcopy(data.draw(st.sampled_from(EXAMPLES)))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(list(places(manifest))))
        holder = manifest
        for key in path:
            holder = holder[key]
        holder[last] = data.draw(VALUES)
    try:
        problems = ()
        import_dgd(yaml.safe_dump(manifest), "f.yaml")
    except InvalidSpecError as refusal:
        problems = refusal.problems
    assert {each.file for each in problems} <= {"f.yaml"}
