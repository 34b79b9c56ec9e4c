"""Checks objects with schemas: Kubernetes' own, strictly, and those of custom resource definitions.

Owns: finding the schema for an object. Never: knows Cleave's chart. A kind without a schema is an error, except
PrometheusRule, whose rules promtool checks (metrics.py).
"""

import functools
import gzip
import re
from pathlib import Path

import jsonschema
import yaml
from kubernetes_validate import utils
from referencing import Registry, Resource

CRDS = Path(__file__).resolve().parents[3] / "testdata/crds"
ELSEWHERE = {"PrometheusRule"}
# The aggregator's own group is not in the schemas of kubernetes-validate.
API_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "apiregistration.k8s.io/v1"},
        "kind": {"const": "APIService"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["groupPriorityMinimum", "versionPriority"],
            "properties": {
                "group": {"type": "string"},
                "version": {"type": "string"},
                "groupPriorityMinimum": {"type": "integer", "minimum": 1, "maximum": 20000},
                "versionPriority": {"type": "integer", "minimum": 1, "maximum": 1000},
                "caBundle": {"type": "string"},
                "insecureSkipTLSVerify": {"type": "boolean"},
                "service": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name", "namespace"],
                    "properties": {
                        "name": {"type": "string"},
                        "namespace": {"type": "string"},
                        "port": {"type": "integer", "minimum": 1, "maximum": 65535},
                    },
                },
            },
        },
    },
}


def strict(node: object, is_root: bool = False) -> object:
    """Returns an OpenAPI v3 schema as a JSON schema that forbids unknown properties."""
    if isinstance(node, list):
        return [strict(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    schema = {key: strict(value) for key, value in node.items() if key not in ("description", "default", "example")}
    if isinstance(node.get("properties"), dict):
        # A property may have the name of one of the keys above.
        schema["properties"] = {key: strict(value) for key, value in node["properties"].items()}
    if node.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
        # The schema may have a pattern for strings beside anyOf, which has the types.
        schema.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if node.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if is_root:
        # The definition leaves metadata open, since the API server has its own schema for it.
        schema["properties"]["metadata"] = {"type": "object"}
    open_ended = node.get("x-kubernetes-preserve-unknown-fields") or node.get("x-kubernetes-embedded-resource")
    if "properties" in schema and "additionalProperties" not in schema and not open_ended:
        schema["additionalProperties"] = False
    return schema


@functools.cache
def custom() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """Returns validators of custom resources by apiVersion and kind."""
    found = {}
    for path in sorted(CRDS.glob("*.yaml.gz")):
        for definition in yaml.load_all(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader):
            if not definition:
                continue
            spec = definition["spec"]
            for version in spec["versions"]:
                schema = strict(version["schema"]["openAPIV3Schema"], is_root=True)
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                found[key] = jsonschema.Draft202012Validator(schema)
    found[("apiregistration.k8s.io/v1", "APIService")] = jsonschema.Draft202012Validator(API_SERVICE)
    return found


@functools.cache
def builtin(api_version: str, kind: str, kubernetes: str) -> jsonschema.Draft202012Validator:
    """Returns the strict schema of one kind, as `kubernetes_validate.validate` does, but reads it only once.

    Raises FileNotFoundError if this Kubernetes has no such kind.
    """
    folder = f"kubernetes-json-schema/v{kubernetes}.0-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = utils.schema_contents(f"{folder}/{kind.lower()}-{group}.json", kubernetes)
    return jsonschema.Draft202012Validator(schema, registry=Resource.from_contents(schema) @ definitions(kubernetes))


@functools.cache
def definitions(kubernetes: str) -> Registry:
    """Returns the definitions that all kinds refer to, a megabyte."""
    found = utils.schema_contents(f"kubernetes-json-schema/v{kubernetes}.0-local-strict/_definitions.json", kubernetes)
    return Resource.from_contents(found) @ Registry()


def flaws(document: dict, kubernetes: str) -> list[str]:
    """Returns violations of the schema for this Kubernetes by the object; paths first."""
    api_version, kind = document["apiVersion"], document["kind"]
    if kind in ELSEWHERE:
        return []
    try:
        validator = custom().get((api_version, kind)) or builtin(api_version, kind, kubernetes)
    except FileNotFoundError:
        return [f"Kubernetes {kubernetes} has no {api_version} {kind}, nor is there a definition of it"]
    return [f"{error.json_path}: {error.message[:300]}" for error in validator.iter_errors(document)]
