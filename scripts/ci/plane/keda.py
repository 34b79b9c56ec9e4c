"""The part of KEDA's operator that asks a scaler: KEDA itself cannot be installed here.

Owns: the calls of KEDA's protocol, and the replicas that its HPA would set. Never: knows how a router decides.
For each ScaledObject: the scaler is active or not (polled, and pushed by StreamIsActive), which is 0 or 1; above that
replicas are the metric's value divided by its target (AverageValue), within the object's bounds, written to `/scale`.
"""

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from api import Api, ApiError

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "proto/externalscaler"))
messages, services = grpc.protos_and_services("externalscaler.proto")

OBJECTS = "/apis/keda.sh/v1alpha1/namespaces/{}/scaledobjects"
# Times are shortened for the test: KEDA polls every 5 s, and the chart's cooldown is 600 s.
POLL, COOLDOWN = 1.0, 5.0


class Keda:
    """An autoscaler for all ScaledObjects of a namespace, until `stopped`. `resolve` gives the addresses of a
    Service."""

    def __init__(self, api: Api, namespace: str, resolve: Callable[[str], list[str]]) -> None:
        self.api, self.namespace, self.resolve = api, namespace, resolve
        self.stopped = threading.Event()
        self.channels: dict[str, grpc.Channel] = {}
        # The time at which a pool was last active.
        self.active_at: dict[str, float] = {}
        self.turn = 0
        self.targets: dict[str, object] = {}
        # Answered calls by name, pushed states, and the number of answers in which two routers differed.
        self.answered: dict[str, int] = {}
        self.pushed: dict[str, list[bool]] = {}
        self.compared = self.differed = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()
        for channel in self.channels.values():
            channel.close()

    def _run(self) -> None:
        watched: set[str] = set()
        while not self.stopped.wait(POLL):
            # A call without an answer changes nothing, and is repeated, as in KEDA.
            with contextlib.suppress(ApiError, OSError):
                for one in self.api.items(OBJECTS.format(self.namespace)):
                    name = one["metadata"]["name"]
                    if name not in watched:
                        watched.add(name)
                        threading.Thread(target=self._watch, args=(name, one["spec"]), daemon=True).start()
                    with contextlib.suppress(grpc.RpcError, ValueError):
                        self._scale(name, one["spec"])

    def _stubs(self, spec: dict) -> list:
        """Returns a stub for each router, beginning with another one each time, as KEDA's client takes turns."""
        host, port = spec["triggers"][0]["metadata"]["scalerAddress"].rsplit(":", 1)
        addresses = sorted(f"{ip}:{port}" for ip in self.resolve(host))
        for address in addresses:
            if address not in self.channels:
                self.channels[address] = grpc.insecure_channel(address)
        self.turn += 1
        at = self.turn % max(len(addresses), 1)
        return [services.ExternalScalerStub(self.channels[address]) for address in addresses[at:] + addresses[:at]]

    def _ask(self, spec: dict, call: str, question: object) -> object:
        """Returns the answer of the router whose turn it is; compares those of the others with it."""
        first, *others = self._stubs(spec)
        answer = getattr(first, call)(question, timeout=3)
        self.answered[call] = self.answered.get(call, 0) + 1
        for stub in others:
            try:
                same = getattr(stub, call)(question, timeout=3) == answer
            except grpc.RpcError:
                continue
            self.compared += 1
            self.differed += not same
        return answer

    def _object(self, name: str, spec: dict) -> object:
        return messages.ScaledObjectRef(name=name, namespace=self.namespace, scalerMetadata=spec["triggers"][0]["metadata"])

    def _scale(self, name: str, spec: dict) -> None:
        """Polls once, in the order of KEDA's client: the value, then whether the pool is active; the target only
        once."""
        this = self._object(name, spec)
        if name not in self.targets:
            (self.targets[name],) = self._ask(spec, "GetMetricSpec", this).metricSpecs
        metric = self.targets[name]
        path = f"/apis/apps/v1/namespaces/{self.namespace}/deployments/{spec['scaleTargetRef']['name']}/scale"
        now = self.api.ask("GET", path)["spec"].get("replicas", 0)
        question = messages.GetMetricsRequest(scaledObjectRef=this, metricName=metric.metricName)
        (value,) = self._ask(spec, "GetMetrics", question).metricValues
        if self._ask(spec, "IsActive", this).result:
            self.active_at[name] = time.monotonic()
            wanted = math.ceil(value.metricValueFloat / metric.targetSizeFloat)
            wanted = min(max(wanted, spec["minReplicaCount"], 1), spec["maxReplicaCount"])
        else:
            cools = time.monotonic() - self.active_at.setdefault(name, time.monotonic()) < COOLDOWN
            wanted = min(now, 1) if cools and now else spec["minReplicaCount"]
        if wanted != now:
            self.api.patch(path, {"spec": {"replicas": wanted}})

    def _watch(self, name: str, spec: dict) -> None:
        """Collects the states that any router pushes for one object."""
        said = self.pushed.setdefault(name, [])
        while not self.stopped.is_set():
            try:
                for answer in self._stubs(spec)[0].StreamIsActive(self._object(name, spec)):
                    said.append(answer.result)
            except (grpc.RpcError, IndexError, ValueError):
                time.sleep(POLL)
