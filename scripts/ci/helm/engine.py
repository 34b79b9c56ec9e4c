"""Renders the chart with Helm's own engine, through the one entry point that takes a Kubernetes version.

`helm_python`'s method for rendering has no argument for capabilities; the library beneath it has. Only this file
depends on that.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import helm_python
import yaml
from helm_python import _native

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm/cleave"
RELEASE = {"name": "prod", "namespace": "llm"}


class Refused(Exception):
    """Helm refused to render these values; the text names the path."""


@functools.cache
def _chart() -> helm_python.Chart:
    """Returns the chart, read once: a rendering does not change it."""
    return contextlib.ExitStack().enter_context(helm_python.Chart.load(str(CHART)))


def render(values: dict, kubernetes: str, name: str = RELEASE["name"]) -> dict[str, str]:
    """Renders a release of this name; returns text by template. `kubernetes` is a version such as 1.31."""
    options = {**RELEASE, "name": name, "kube_version": f"v{kubernetes}.0"}
    try:
        text = _native.call_string("helm_render", _chart()._raw(), json.dumps(values), json.dumps(options))
    except helm_python.HelmError as error:
        raise Refused(str(error)) from error
    return json.loads(text)


def objects(rendered: dict[str, str]) -> Iterator[dict]:
    """Yields the objects that Helm would apply."""
    for name, text in rendered.items():
        if not name.endswith("NOTES.txt"):
            yield from (document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document)


def lint(kubernetes: str) -> list[str]:
    """Returns complaints of `helm lint --strict`: warnings (2) and worse, so not the missing icon."""
    found = helm_python.lint(str(CHART), strict=True, kube_version=f"v{kubernetes}.0")
    return [message["error"] for message in found["messages"] if message["severity"] > 1] + found["errors"]


def merged(*layers: dict) -> dict:
    """Merges layers of values, the later ones over the earlier ones, as Helm does."""
    result: dict = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result
