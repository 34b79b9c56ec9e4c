"""Finds NVIDIA's tools on the PATH, in the Python package of the machine, or in the bundle. Standard library only."""

import importlib.util
import shutil
from pathlib import Path


def find(name: str, bundle: Path | None = None) -> str | None:
    """Returns a program by its name, or `None`."""
    if found := shutil.which(name):
        return found
    folders = [] if bundle is None else [bundle / "tools"]
    package = importlib.util.find_spec("nvidia")
    if package and package.submodule_search_locations:
        for root in package.submodule_search_locations:
            folders += Path(root).glob("cu*/bin")
            folders += Path(root).glob("cu*/compute-sanitizer")
    folders += [Path("/usr/local/cuda/bin"), Path("/opt/nvidia/nsight-compute")]
    return next((str(folder / name) for folder in folders if (folder / name).is_file()), None)
