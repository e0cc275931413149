"""Finds and reads profile files; the command line and the worker call it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import yaml
from pydantic import ValidationError

from penstock.core.errors import ConfigError
from penstock.core.validation import findings
from penstock.engine.profiles.schema import Profile

_SUFFIX = ".yaml"


def names() -> list[str]:
    """Return the names of the profiles that come with Penstock, sorted."""
    files = resources.files(__package__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load(name: str) -> Profile:
    """Return a profile.

    Args:
        name: One of `names`, or the path of a file ending in ``.yaml``.

    Raises:
        ConfigError: there is no such profile, or its file is wrong.
    """
    if name.endswith(_SUFFIX):
        try:
            return parse(Path(name).read_text(encoding="utf-8"), origin=name)
        except OSError as exc:
            raise ConfigError(f"--profile {name}: cannot read it: {exc.strerror}") from exc
    if name not in (known := names()):
        raise ConfigError(
            f"--profile {name!r} is unknown; choose one of {', '.join(known)} or give the path of a .yaml file"
        )
    return parse(resources.files(__package__).joinpath(name + _SUFFIX).read_text("utf-8"), origin=name)


def parse(text: str, *, origin: str) -> Profile:
    """Return the profile that ``text`` describes.

    Raises:
        ConfigError: not YAML, or fields are missing, unknown or out of range; all are named.
    """
    try:
        profile = Profile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as exc:
        raise ConfigError(f"profile {origin}: not YAML: {exc}") from exc
    except ValidationError as exc:
        raise ConfigError(f"profile {origin}: {findings(exc, root='file')}") from exc
    if profile.kv_capacity_tokens < 1:
        raise ConfigError(f"profile {origin}: kv.derived: the weights leave no memory for the KV cache")
    return profile
