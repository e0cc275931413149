"""`penstock demo`: the main job in one command, as a script reads it."""

import json

TRACE = "poisson:rate=2,count=40,input_tokens=500,output_tokens=20"


def test_its_json_is_the_report_alone(world):
    """Progress goes to stderr; a headline and the load's figures are there; the graph is gone."""
    done = world.run("demo", "--json", "--trace", TRACE, "--output-dir", world.folder / "demo")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["headline"].startswith("Served 40 of 40; ")
    assert found["load"]["requests"]["ok"] == 40
    assert "nothing is left running" in done.stderr
    assert not list((world.folder / "state").glob("*.json"))
