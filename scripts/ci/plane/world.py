"""Releases of the chart on a control plane, made by Helm's engine, and their state in the API server.

Owns: the chart as Kubernetes 1.20 accepts it, waits, counts. Never: judges an outcome.
"""

import gzip
import http.client
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import helm_python
import yaml
from helm_python import _native

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helm"))
from api import Api
from control import Control
from engine import CHART, ROOT, merged
from kubelet import Kubelet
from network import Services

# Lines of the chart that 1.20 names otherwise or lacks: (file, text, replacement).
OF_1_20 = (
    ("Chart.yaml", 'kubeVersion: ">=1.29.0-0"', 'kubeVersion: ">=1.20.0-0"'),
    ("templates/autoscaling.yaml", "apiVersion: autoscaling/v2\n", "apiVersion: autoscaling/v2beta2\n"),
    ("templates/disruption.yaml", "apiVersion: policy/v1\n", "apiVersion: policy/v1beta1\n"),
    ("templates/disruption.yaml", "  unhealthyPodEvictionPolicy: AlwaysAllow\n", ""),
)
LABEL = "app.kubernetes.io/component"


def chart_of_1_20(folder: Path) -> Path:
    """Copies the chart with four lines replaced."""
    copy = folder / "chart"
    shutil.copytree(CHART, copy)
    for name, text, other in OF_1_20:
        path = copy / name
        if text not in path.read_text():
            raise AssertionError(f"{name} has no {text!r} any more: adapt OF_1_20")
        path.write_text(path.read_text().replace(text, other))
    return copy


def values(name: str, *more: dict) -> dict:
    """Returns a values file of the repository, with more values over it."""
    return merged(yaml.safe_load((ROOT / "helm/values" / name).read_text()), *more)


def wait_until(what: str, probe: Callable[[], object], limit: float = 60.0) -> object:
    """Returns the first true result of `probe`; raises after `limit` seconds."""
    begun = time.monotonic()
    while not (found := probe()):
        if time.monotonic() - begun > limit:
            raise AssertionError(f"{what}: not within {limit:.0f} s")
        time.sleep(0.1)
    return found


class Cluster(NamedTuple):
    """The parts of a cluster on which releases run."""

    control: Control
    kubelet: Kubelet
    services: Services


class World:
    """One release in a namespace of its name; the nodes run nothing else."""

    def __init__(self, cluster: Cluster, chart: Path, name: str) -> None:
        self.control, self.kubelet, self.services = cluster
        self.chart, self.name = chart, name
        # Helm 4 uses server-side apply. The API server of 1.20 crashes at it for an APIService, so such releases do
        # without.
        self.server_side = True
        self.api: Api = self.control.api
        self.config = helm_python.Config(kubeconfig_content=self.control.kubeconfig, namespace=name)

    # === Helm ===

    def install(self, said: dict) -> None:
        self._write("helm_install", said, server_side_apply=self.server_side, create_namespace=True)

    def upgrade(self, said: dict) -> None:
        self._write("helm_upgrade", said, server_side_apply="true" if self.server_side else "false")

    def _write(self, call: str, said: dict, **options: object) -> None:
        """Calls the library's own entry point: the method in Python has no argument for the kind of apply."""
        options |= {"namespace": self.name, "timeout_seconds": 60}
        with helm_python.Chart.load(str(self.chart)) as chart:
            _native.call_string(call, self.config._raw(), self.config._context_arg(None), chart._raw(), None, self.name,
                                json.dumps(said), json.dumps(options))

    # === pods ===

    def pods(self, component: str | None = None) -> list[dict]:
        """Returns pods that are not being deleted, by name."""
        found = self.api.items(f"/api/v1/namespaces/{self.name}/pods")
        mine = (one for one in found if component in (None, one["metadata"]["labels"].get(LABEL)))
        return sorted((one for one in mine if "deletionTimestamp" not in one["metadata"]), key=lambda one: one["metadata"]["name"])

    def ready(self, component: str | None = None) -> list[dict]:
        return [one for one in self.pods(component) if is_ready(one)]

    def names(self, component: str) -> set[str]:
        return {one["metadata"]["name"] for one in self.pods(component)}

    def deployment(self, component: str) -> dict:
        return self.api.ask("GET", f"/apis/apps/v1/namespaces/{self.name}/deployments/{self.full}-{component}")

    @property
    def full(self) -> str:
        return self.name if "cleave" in self.name else f"{self.name}-cleave"

    def replicas(self, component: str) -> int:
        return self.deployment(component)["spec"]["replicas"]

    def settled(self, component: str) -> bool:
        """Whether the Deployment is rolled out, and no earlier pod is left."""
        one = self.deployment(component)
        wanted, status = one["spec"]["replicas"], one["status"]
        counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")}
        selector = f"{LABEL}%3D{component}"
        there = self.api.items(f"/api/v1/namespaces/{self.name}/pods?labelSelector={selector}")
        return (status.get("observedGeneration") == one["metadata"]["generation"] and counts == {wanted}
                and len(there) == wanted)

    def wait_settled(self, *components: str, limit: float = 90.0) -> None:
        for component in components:
            wait_until(f"{component} settled", lambda: self.settled(component), limit)

    # === asking routers ===

    def service(self) -> str:
        """Returns the address for clients."""
        found = self.api.ask("GET", f"/api/v1/namespaces/{self.name}/services/{self.full}")
        return f"{found['spec']['clusterIP']}:{found['spec']['ports'][0]['port']}"

    def metric(self, name: str, label: str = "", component: str = "router") -> float:
        """Returns the sum of a series over the ready pods."""
        total = 0.0
        for pod in self.ready(component):
            lines = get(pod["status"]["podIP"], 8001, "/metrics").splitlines()
            named = (line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line)
            total += sum(float(line.rsplit(" ", 1)[1]) for line in named)
        return total

    def running(self, pod: dict) -> int:
        """Returns the number of streams of a router, or of sequences of a worker."""
        component = pod["metadata"]["labels"][LABEL]
        series = "cleave_flights" if component == "router" else "vllm:num_requests_running"
        lines = get(pod["status"]["podIP"], 8001, "/metrics").splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{series}[{{ ]", line)))

    def on(self, node: str) -> list[str]:
        """Returns the names of the pods on the node, also of those that are ending."""
        found = self.api.items(f"/api/v1/namespaces/{self.name}/pods")
        return [one["metadata"]["name"] for one in found if one["spec"].get("nodeName") == node]

    def left(self) -> list[str]:
        """Lists remains of the release, in the API server and on the nodes."""
        found = []
        groups = ["/api/v1"] + [f"/apis/{one['preferredVersion']['groupVersion']}" for one in self.api.ask("GET", "/apis")["groups"]]
        for group in groups:
            kinds = self.api.get(group) or {"resources": []}
            for kind in kinds["resources"]:
                if "list" in kind["verbs"] and kind["name"] not in ("events", "endpointslices", "componentstatuses"):
                    for one in self.api.items(f"{group}/{kind['name']}"):
                        if one["metadata"].get("labels", {}).get("app.kubernetes.io/instance") == self.name:
                            found.append(f"{kind['name']}/{one['metadata']['name']}")
        found += [f"process of {life.meta['name']}" for life in list(self.kubelet.lives.values())]
        found += [f"network namespace {path.name}" for path in Path("/run/netns").iterdir()]
        found += [f"mount {line.split()[1]}" for line in Path("/proc/mounts").read_text().splitlines() if "/run/plane/" in line]
        return found


def is_ready(pod: dict) -> bool:
    said = pod["status"].get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in said)


def get(host: str, port: int, path: str) -> str:
    """Returns the body, or an empty text without an answer."""
    try:
        connection = http.client.HTTPConnection(host, port, timeout=5)
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""


def add_crd(api: Api, path: Path) -> None:
    """Adds a custom resource definition as its project releases it."""
    for one in yaml.safe_load_all(gzip.decompress(path.read_bytes())):
        if one:
            api.ask("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", one)
