"""Kubelets of processes: pods of the API server become network namespaces with processes in them.

Owns: the node of a pod, its address, volumes, probes, restarts and end, and its status.
Never: knows the program in a pod.

Behaviour of a kubelet: init containers run one after the other; the startup probe precedes the others; the readiness
probe makes a pod ready; a container that ended or whose liveness probe failed is started again; a deletion means
SIGTERM, the grace period, SIGKILL. Differences: it binds pods itself, without a scheduler, to the node with the fewest
pods; a changed ConfigMap arrives within a second.
"""

import contextlib
import datetime
import http.client
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from base64 import b64decode
from pathlib import Path

import network
from api import MERGE, Api, ApiError, Cache
from container import Around, Container, Image, tmpfs

TICK = 0.1
RESTART_AFTER = 0.5
FOLDER = Path("/run/plane")
# Addresses of pods begin at 10.244.1.1.
PODS = "10.244"


class Probe:
    """One probe of a container: its next time, and the number of equal results in a row."""

    def __init__(self, spec: dict | None, ports: list[dict]) -> None:
        self.spec, self.ports = spec, {one.get("name"): one["containerPort"] for one in ports}
        self.good = self.bad = 0
        self.due = time.monotonic() + (spec or {}).get("initialDelaySeconds", 0)

    def look(self, address: str) -> None:
        if self.spec is None or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.spec["periodSeconds"]
        held = self._asks(address)
        self.good, self.bad = (self.good + 1, 0) if held else (0, self.bad + 1)

    @property
    def held(self) -> bool:
        """Whether the probe succeeded often enough in a row, or does not exist."""
        return self.spec is None or self.good >= self.spec["successThreshold"]

    @property
    def failed(self) -> bool:
        return self.spec is not None and self.bad >= self.spec["failureThreshold"]

    def _asks(self, address: str) -> bool:
        kind = next(kind for kind in ("httpGet", "tcpSocket") if kind in self.spec)
        asked = self.spec[kind]
        port = self.ports.get(asked["port"], asked["port"])
        try:
            if kind == "tcpSocket":
                socket.create_connection((address, port), self.spec["timeoutSeconds"]).close()
                return True
            with contextlib.closing(http.client.HTTPConnection(address, port, timeout=self.spec["timeoutSeconds"])) as connection:
                connection.request("GET", asked["path"])
                return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False


class Pod(threading.Thread):
    """The life of a pod, from its binding until nothing of it is left."""

    def __init__(self, kubelet: "Kubelet", pod: dict, number: int) -> None:
        super().__init__(daemon=True)
        self.kubelet, self.pod, self.number = kubelet, pod, number
        self.meta, self.spec = pod["metadata"], pod["spec"]
        self.path = f"/api/v1/namespaces/{self.meta['namespace']}/pods/{self.meta['name']}"
        # The name of a link has at most 15 letters.
        self.namespace = f"pod{number}"
        self.address = f"{PODS}.{number // 250 + 1}.{number % 250 + 1}"
        self.folder = FOLDER / self.namespace
        self.container: Container | None = None
        self.is_ready = False
        self.told: dict | None = None
        # The time of SIGKILL.
        self.dies_at: float | None = None
        self.grace = 0.0
        self.configs: dict[str, str] = {}
        self.trouble = ""

    # === from outside ===

    def end(self, grace: float) -> None:
        """Ends the pod; a shorter grace period replaces the present one, a longer one does not."""
        dies_at = time.monotonic() + grace
        if self.dies_at is None or dies_at < self.dies_at:
            self.dies_at, self.grace = dies_at, grace

    # === its life ===

    def run(self) -> None:
        try:
            network.join(self.namespace, self.namespace, self.address)
            if self._prepare():
                self._serve()
        except Exception as error:
            # Waiters on the pod see the error; an exception in this thread would go unnoticed.
            self.trouble = f"{type(error).__name__}: {error}"
            self.kubelet.troubles.append(f"{self.meta['name']}: {self.trouble}")
            self.is_ready = False
            self._tell("Failed")
            while self.dies_at is None:
                time.sleep(TICK)
        self._clear()
        self.kubelet.gone(self)

    def _prepare(self) -> bool:
        """Prepares volumes and runs init containers; returns false if the pod is to end before they are done."""
        (self.folder / "root").mkdir(parents=True)
        self.volumes = {one["name"]: self._volume(one) for one in self.spec.get("volumes", [])}
        self._tell("Pending")
        for spec in self.spec.get("initContainers", []):
            while True:
                code = self._to_its_end(self._make(spec))
                if code is None:
                    return False
                if code == 0:
                    break
        return True

    def _to_its_end(self, container: Container) -> int | None:
        container.start(self.namespace)
        while container.code() is None:
            if self.dies_at is not None:
                container.tell(signal.SIGKILL)
                container.child.wait()
                return None
            time.sleep(TICK)
        return container.code()

    def _serve(self) -> None:
        if len(self.spec["containers"]) != 1:
            raise AssertionError("one container, as every pod of the chart has")
        (spec,) = self.spec["containers"]
        self.container = self._make(spec)
        while self._starts(spec):
            pass

    def _starts(self, spec: dict) -> bool:
        """Runs the container once; returns whether to start it again."""
        container, ports = self.container, spec.get("ports", [])
        container.start(self.namespace)
        startup, live, ready = (Probe(spec.get(f"{kind}Probe"), ports) for kind in ("startup", "liveness", "readiness"))
        while container.code() is None:
            self._refresh()
            if self.dies_at is not None:
                self._end_container()
                return False
            startup.look(self.address) if not startup.held else (live.look(self.address), ready.look(self.address))
            if startup.failed and not startup.held or live.failed:
                container.tell(signal.SIGKILL)
                container.child.wait()
                break
            # The first success makes the pod ready; only the threshold of failures makes it unready.
            self.is_ready = startup.held and (ready.held or self.is_ready and not ready.failed)
            self._tell("Running")
            time.sleep(TICK)
        self.is_ready = False
        code = container.code()
        if self.spec.get("restartPolicy", "Always") == "Never":
            self._tell("Succeeded" if code == 0 else "Failed", code)
            while self.dies_at is None:
                time.sleep(TICK)
            return False
        self._tell("Running")
        again_at = time.monotonic() + RESTART_AFTER
        while self.dies_at is None and time.monotonic() < again_at:
            time.sleep(TICK)
        return self.dies_at is None

    def _end_container(self) -> None:
        """Sends SIGTERM, then SIGKILL after the grace period. Probes go on; endpoints leave the pod out anyway."""
        self.container.tell(signal.SIGTERM)
        while self.container.code() is None:
            if time.monotonic() >= self.dies_at:
                self.container.tell(signal.SIGKILL)
                self.container.child.wait()
                if self.grace:
                    self.kubelet.killed.append(self.meta["name"])
            time.sleep(TICK / 2)

    def _clear(self) -> None:
        network.part(self.namespace)
        for path, _ in self.configs.items():
            shutil.rmtree(path, ignore_errors=True)
        for mounted in (self.folder / "volumes").glob("*"):
            subprocess.run(["umount", "-q", mounted], capture_output=True)
        shutil.rmtree(self.folder)
        self.kubelet.api.delete(self.path, gracePeriodSeconds=0, preconditions={"uid": self.meta["uid"]})

    # === parts ===

    def _make(self, spec: dict) -> Container:
        image = self.kubelet.images[re.split("[:@]", spec["image"])[0]]
        log = self.kubelet.logs / f"{self.meta['name']}.{spec['name']}.log"
        return Container(self.pod, spec, image, Around(self.volumes, self.address, log))

    def _volume(self, spec: dict) -> Path:
        folder = self.folder / "volumes" / spec["name"]
        folder.mkdir(parents=True)
        if "emptyDir" in spec:
            if spec["emptyDir"].get("medium") == "Memory":
                tmpfs(folder, spec["emptyDir"]["sizeLimit"])
            group = self.spec.get("securityContext", {}).get("fsGroup", 0)
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
        elif "configMap" in spec or "secret" in spec:
            self.configs[str(folder)] = ""
            self._refresh()
        else:
            raise AssertionError(f"a volume of an unknown kind: {spec}")
        return folder

    def _refresh(self) -> None:
        """Updates folders of ConfigMaps and Secrets by swapping a link, as a kubelet does."""
        for spec in self.spec.get("volumes", []):
            folder = self.folder / "volumes" / spec["name"]
            if str(folder) not in self.configs:
                continue
            found = self._config(spec)
            version = found["metadata"]["resourceVersion"] if found else self.configs[str(folder)]
            if version == self.configs[str(folder)]:
                continue
            fresh, link = folder / f"..{version}", folder / "..data"
            fresh.mkdir()
            for name, data in found["files"].items():
                (fresh / name).write_bytes(data)
                if not (folder / name).is_symlink():
                    (folder / name).symlink_to(f"..data/{name}")
            (folder / "..fresh").symlink_to(fresh.name)
            (folder / "..fresh").rename(link)
            if self.configs[str(folder)]:
                shutil.rmtree(folder / f"..{self.configs[str(folder)]}")
            self.configs[str(folder)] = version

    def _config(self, spec: dict) -> dict | None:
        caches = self.kubelet.configs, self.kubelet.secrets
        if "configMap" in spec:
            found = caches[0].find(self.meta["namespace"], spec["configMap"]["name"])
            return found and found | {"files": {name: text.encode() for name, text in found.get("data", {}).items()}}
        found = caches[1].find(self.meta["namespace"], spec["secret"]["secretName"])
        return found and found | {"files": {name: b64decode(text) for name, text in found.get("data", {}).items()}}

    def _tell(self, phase: str, code: int | None = None) -> None:
        """Writes the pod's status if it differs from the last one."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = {"Initialized": self.container is not None, "PodScheduled": True, "ContainersReady": self.is_ready, "Ready": self.is_ready}
        conditions = [{"type": kind, "status": str(held), "lastTransitionTime": now} for kind, held in said.items()]
        status = {"phase": phase, "message": self.trouble, "podIP": self.address, "podIPs": [{"ip": self.address}],
                  "hostIP": network.NODE, "containerStatuses": []}
        if self.container:
            state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
            spec = self.container.spec
            status["containerStatuses"] = [{"name": spec["name"], "image": spec["image"], "imageID": "", "ready": self.is_ready,
                                            "started": self.is_ready, "restartCount": self.container.restarts, "state": state}]
        if status == self.told:
            return
        known, self.told = self.told, status
        begun = {} if known else {"startTime": now}
        try:
            self.kubelet.api.ask("PATCH", f"{self.path}/status", {"status": status | begun | {"conditions": conditions}}, MERGE)
        except ApiError as error:
            # The object was removed at once.
            if error.status != 404:
                raise
        except (OSError, http.client.HTTPException):
            # The API server is ending, or slow; the next round writes the status again.
            self.told = known


class Kubelet:
    """Nodes by their names, and the pods on them."""

    def __init__(self, api: Api, nodes: list[str], images: dict[str, Image], logs: Path) -> None:
        self.api, self.images, self.logs = api, images, logs
        self.lives: dict[str, Pod] = {}
        # Pods that did not end within their grace period, and errors of this emulation.
        self.killed: list[str] = []
        self.troubles: list[str] = []
        self.number = 0
        self.stirred: queue.Queue[None] = queue.Queue()
        for name in nodes:
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
            api.ask("POST", "/api/v1/nodes", node)
            api.patch(f"/api/v1/nodes/{name}/status", {"status": {
                "conditions": [{"type": "Ready", "status": "True"}], "capacity": {"pods": "1000"}, "allocatable": {"pods": "1000"}}})
        self.nodes = Cache(api, "/api/v1/nodes")
        self.configs = Cache(api, "/api/v1/configmaps")
        self.secrets = Cache(api, "/api/v1/secrets")
        self.pods = Cache(api, "/api/v1/pods", lambda: self.stirred.put(None))
        threading.Thread(target=self._follow, daemon=True).start()

    def life(self, pod: dict) -> Pod | None:
        return self.lives.get(pod["metadata"]["uid"])

    def gone(self, pod: Pod) -> None:
        self.lives.pop(pod.meta["uid"], None)

    def _follow(self) -> None:
        while True:
            self.stirred.get()
            while not self.stirred.empty():
                self.stirred.get()
            for pod in self.pods.all():
                try:
                    self._look(pod)
                except (ApiError, OSError, http.client.HTTPException) as error:
                    # The pod was changed or removed in the meantime; the next round sees its present state.
                    if not isinstance(error, ApiError) or error.status not in (404, 409):
                        self.troubles.append(str(error))
            self._orphans()

    def _look(self, pod: dict) -> None:
        meta, life = pod["metadata"], self.life(pod)
        leaves = "deletionTimestamp" in meta
        if life and leaves:
            life.end(meta.get("deletionGracePeriodSeconds", 0))
        elif leaves and not life:
            self.api.delete(f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}", gracePeriodSeconds=0)
        elif not life and not leaves and pod["status"].get("phase", "Pending") == "Pending":
            if not pod["spec"].get("nodeName"):
                self._bind(meta)
            elif self._configured(pod):
                self.number += 1
                self.lives[meta["uid"]] = one = Pod(self, pod, self.number)
                one.start()

    def _configured(self, pod: dict) -> bool:
        """Whether every ConfigMap and Secret of the pod exists; otherwise the pod waits."""
        namespace = pod["metadata"]["namespace"]
        for volume in pod["spec"].get("volumes", []):
            if "configMap" in volume and not self.configs.find(namespace, volume["configMap"]["name"]):
                return False
            if "secret" in volume and not self.secrets.find(namespace, volume["secret"]["secretName"]):
                return False
        return True

    def _bind(self, meta: dict) -> None:
        open_nodes = [one["metadata"]["name"] for one in self.nodes.all() if not one["spec"].get("unschedulable")]
        if not open_nodes:
            return
        held = [one.spec["nodeName"] for one in list(self.lives.values())]
        node = min(sorted(open_nodes), key=held.count)
        self.api.ask("POST", f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/binding", {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": meta["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node}})

    def _orphans(self) -> None:
        """Ends pods that were deleted with `--force`, and have no object any more."""
        there = {one["metadata"]["uid"] for one in self.pods.all()}
        for uid, life in list(self.lives.items()):
            if uid not in there:
                life.end(0)
