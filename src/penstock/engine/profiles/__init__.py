"""Latency profiles: one YAML file per GPU, model and tensor-parallel size, with sources and errors.

`load` reads one by name (or a user's own file by path); `names` lists the ones that come with Penstock.
"""

from penstock.engine.profiles.schema import Profile, load, names

__all__ = ["Profile", "load", "names"]
