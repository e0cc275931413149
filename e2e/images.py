"""Images of this checkout, built and put on the cluster's nodes: no registry is asked for them."""

from __future__ import annotations

import os
from pathlib import Path

from kube import Kube, say

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "manifests" / "samples"
CLUSTER = "penstock-e2e"
NODES = (f"{CLUSTER}-worker", f"{CLUSTER}-worker2")
"""As kind names them; no pod of ours runs on the control plane."""
BASE_IMAGE = "docker.io/library/python:3.11-slim"
"""The Dockerfile's by its tag, which a machine that reaches no registry may have built itself."""


def container_tool() -> str:
    """Return the program that builds images: kind's own provider, unless CONTAINER_TOOL says otherwise."""
    default = os.environ.get("KIND_EXPERIMENTAL_PROVIDER", "docker")
    return os.environ.get("CONTAINER_TOOL", default)


def load_image(cluster: Kube, image: str, folder: Path, *, nodes: tuple[str, ...], variant: str = "") -> None:
    """Build an image and load it into nodes.

    Args:
        cluster: Whose environment kind, make and the container tool run in.
        image: Its name and tag.
        folder: For an archive, which needs some hundred MB for a moment.
        nodes: That may run it.
        variant: Of the image, as `requirements/` names them; empty: the standard one.
    """
    tool = container_tool()
    flags = f"--build-arg BASE_IMAGE={BASE_IMAGE} {os.environ.get('IMAGE_BUILD_FLAGS', '')}"
    if variant:
        flags = f"{flags} --build-arg VARIANT={variant}"
    say(f"building {image}")
    cluster.run(
        "make", "-C", str(ROOT), "image", f"IMAGE={image}", f"CONTAINER_TOOL={tool}", f"IMAGE_BUILD_FLAGS={flags}",
        timeout_s=600.0,
    )  # fmt: skip
    put_image(cluster, image, folder, nodes=nodes)


def put_image(
    cluster: Kube, image: str, folder: Path, *, nodes: tuple[str, ...], timeout_s: float = 300.0
) -> None:
    """Put an image that was built here on nodes.

    Args:
        cluster: Whose environment kind and the container tool run in.
        image: Its name and tag.
        folder: For an archive of its size, for a moment.
        nodes: That may run it.
        timeout_s: Of each of the two steps.
    """
    tool = container_tool()
    say(f"loading {image} into {', '.join(nodes)}")
    where = ("--name", CLUSTER, "--nodes", ",".join(nodes))
    if tool == "docker":
        cluster.run("kind", "load", "docker-image", image, *where, timeout_s=timeout_s)
    else:
        archive = folder / "image.tar"
        cluster.run(tool, "save", "--output", str(archive), image, timeout_s=timeout_s)
        cluster.run("kind", "load", "image-archive", str(archive), *where, timeout_s=timeout_s)
        archive.unlink()
