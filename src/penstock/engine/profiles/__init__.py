"""Latency profiles: one YAML file per GPU, model and tensor-parallel size, with sources and errors."""

from penstock.engine.profiles.schema import Profile, load, names

__all__ = ["Profile", "load", "names"]
