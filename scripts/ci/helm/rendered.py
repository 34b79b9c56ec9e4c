"""The objects of one rendering, as the rules look at them.

Owns: finding pods, arguments, ports and selected workloads among objects. Never: judges.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

WORKLOADS = {"Deployment", "LeaderWorkerSet"}


@dataclass
class World:
    """The objects of one rendering, and the flags of the binary."""

    objects: list[dict]
    # Flags by command, such as {"router": {"--listen", …}}.
    flags: dict[str, set[str]]
    pods: list[tuple[dict, dict]] = field(init=False)

    def __post_init__(self) -> None:
        templates = [(document, template(document)) for document in self.objects]
        self.pods = [(document, pod) for document, pod in templates if pod]

    def of(self, *kinds: str) -> list[dict]:
        return [document for document in self.objects if document["kind"] in kinds]

    def named(self, kind: str, name: str) -> dict | None:
        return next((one for one in self.of(kind) if one["metadata"]["name"] == name), None)

    def selected(self, labels: dict) -> list[tuple[dict, dict]]:
        """Returns the workloads whose pods have these labels, with their pods."""
        workloads = [(document, pod) for document, pod in self.pods if document["kind"] in WORKLOADS]
        return [(document, pod) for document, pod in workloads if within(labels, pod["metadata"]["labels"])]


def template(document: dict) -> dict | None:
    """Returns metadata and spec of the pods that an object makes, or of the pod itself."""
    if document["kind"] == "Deployment":
        return document["spec"]["template"]
    if document["kind"] == "LeaderWorkerSet":
        return document["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return document if document["kind"] == "Pod" else None


def within(part: dict, whole: dict) -> bool:
    return all(whole.get(key) == value for key, value in part.items())


def selects(selector: dict, labels: dict) -> bool:
    among = all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))
    return among and within(selector.get("matchLabels", {}), labels)


def containers(pod: dict) -> Iterator[dict]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def needed(objects: list[dict]) -> set[str]:
    """Returns what pods and policies refer to and the chart does not make, as `kubectl get` takes it."""
    found = set()
    for pod in filter(None, map(template, objects)):
        found |= {("secret", one["name"]) for one in pod["spec"].get("imagePullSecrets", [])}
        for volume in pod["spec"].get("volumes", []):
            found.add(("secret", volume.get("secret", {}).get("secretName")))
            found.add(("configmap", volume.get("configMap", {}).get("name")))
            found.add(("pvc", volume.get("persistentVolumeClaim", {}).get("claimName")))
        for variable in (one for container in containers(pod) for one in container.get("env", [])):
            found.add(("secret", variable.get("valueFrom", {}).get("secretKeyRef", {}).get("name")))
    for policy in (one for one in objects if one["kind"] == "BackendTLSPolicy"):
        found |= {("configmap", one["name"]) for one in policy["spec"]["validation"].get("caCertificateRefs", [])}
    kinds = {"ConfigMap": "configmap", "PersistentVolumeClaim": "pvc"}
    made = {(kinds.get(one["kind"]), one["metadata"]["name"]) for one in objects}
    return {f"{kind}/{name}" for kind, name in found - made if name}


def arguments(pod: dict) -> dict[str, str]:
    args = pod["spec"]["containers"][0].get("args", [])
    return dict(arg.split("=", 1) for arg in args if "=" in arg)


def ports(pod: dict) -> dict[str, int]:
    """Returns the ports of the first container, which is Cleave's; others are the user's."""
    return {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0].get("ports", [])}


def number(quantity: str) -> float:
    """Returns a quantity of Kubernetes as a number; `GiB`, as Cleave writes sizes, is `Gi`."""
    digits, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity.removesuffix("B")).groups()
    powers = {"": 1, "m": 1e-3} | {letter: 1000**power for power, letter in enumerate("kMGTPE", 1)}
    return float(digits) * (powers | {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)})[unit]
