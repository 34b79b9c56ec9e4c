"""The events of the test, in their order, each with the expected outcome and a check of the real one.

Owns: the expectations. Never: makes a cluster. An event whose outcome differs from the expected one raises.
"""

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from api import ApiError
from container import Image
from control import Control
from keda import Keda
from kubelet import Kubelet
from load import Load, Shape, Stream, told
from network import DOMAIN, Services, node
from world import ROOT, Cluster, World, add_crd, chart_of_1_20, is_ready, merged, values, wait_until

# A token takes 50 ms, whatever the batch of at most twenty; a prompt's token takes half a millisecond.
STEP_MS = 50
PROFILE = {
    "name": "plane", "about": "a device for the control plane's test", "source": "made up", "devices": 1, "block_tokens": 16,
    "token_bytes": 1, "kv_tokens": 100_000, "context_tokens": 8192, "slots": 20, "step_tokens": 512,
    "rows": [[1, STEP_MS * 1_000_000], [20, STEP_MS * 1_000_000], [512, 250_000_000]], "pair_picos": 0, "context_picos": 0,
    "draw_nanos": 0, "link": [0, 0], "host": [0, 0],
}
DEMO = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
# Answers take four seconds, so about four are open at a time, and every event meets some.
STEADY = Shape(rate=1.0, prompt_tokens=64, answer_tokens=80)
PROMPTS = Shape(rate=1.0, prompt_tokens=4000, answer_tokens=2)
ANSWERS = Shape(rate=3.0, prompt_tokens=16, answer_tokens=240)
MAX = {"prefill": 4, "decode": 5}
EXTERNAL = "/apis/external.metrics.k8s.io/v1beta1"


class Failed(AssertionError):
    """The outcome of an event differs from the expected one."""


def expect(held: bool, seen: str) -> str:
    if not held:
        raise Failed(seen)
    return seen


def words(counts: dict[str, object]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def scaling(**more: object) -> dict:
    """Returns `scaling` as the chart makes it from the pools' bounds, with short times; pools grow, and keep their
    legs."""
    pools = {"prefill": {"min": 1, "max": MAX["prefill"]}, "decode": {"min": 2, "max": MAX["decode"]}}
    timed = {name: pool | {"up_after": "2s", "down_after": "5s"} for name, pool in pools.items()}
    return {"devices_max": 9, "flip": False, "start_max": "60s", "turns_max": 1000, "pools": timed} | more


def policy(tpot_ms: int = 300, **more: object) -> dict:
    """Returns a policy by which a request that cannot meet its targets waits instead of being refused."""
    classes = [{"name": "only", "ttft": "5s", "tpot": f"{tpot_ms}ms", "unmet": {"queue": "50s"}}]
    return {"classes": classes, "scaling": scaling(**more)}


SOON = {"scaleDown": {"stabilizationWindowSeconds": 0, "selectPolicy": "Max", "policies": [{"type": "Pods", "value": 4, "periodSeconds": 5}]}}
# Values over a values file of the repository: no GPU, a device that only takes time, and short drains.
OURS = {
    "model": {"source": "init", "path": "check", "servedName": "check",
              "init": {"image": "checkpoint:1", "args": [], "env": []}},
    "policy": {"config": policy()},
    "router": {"shutdownDelaySeconds": 2, "drainSeconds": 60},
    "workers": {"gpus": "0", "image": {"tag": ""}, "drainSeconds": 60, "startupSeconds": 60,
                "extraArgs": ["--engine=mock", "--mock-profile=/model/profile.json"],
                "sharedMemory": {"sizeLimit": "16Mi"}, "autoscaling": {"behavior": SOON}},
    "prefill": {"autoscaling": {"minReplicas": 1, "maxReplicas": MAX["prefill"]}},
    "decode": {"autoscaling": {"minReplicas": 2, "maxReplicas": MAX["decode"], "behavior": SOON}},
}


class Stage:
    """State that events share: the control plane, the nodes, the release and its load."""

    def __init__(self, cleave: Path, binaries: Path, folder: Path) -> None:
        self.cleave, self.binaries, self.folder = cleave, binaries, folder
        self.control: Control | None = None
        self.services: Services | None = None
        self.world: World | None = None
        self.load: Load | None = None
        self.keda: Keda | None = None
        self.values: dict = {}

    def begin(self) -> None:
        for place in ("/run/netns", "/run/plane"):
            Path(place).mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
        node()
        self.control = Control(self.binaries, self.folder / "control")
        bundle = self.folder / "checkpoint"
        bundle.mkdir()
        for name in DEMO:
            (bundle / name).write_bytes((ROOT / "assets/demo" / name).read_bytes())
        (bundle / "profile.json").write_text(json.dumps(PROFILE))
        images = {
            "cleave": Image(["/cleave"], {"/cleave": self.cleave}),
            "checkpoint": Image(["sh", "-c", "mkdir /model/check && cp /bundle/* /model/check && mv /model/check/profile.json /model"],
                                {"/bundle": bundle}),
        }
        logs = self.folder / "pods"
        logs.mkdir()
        self.kubelet = Kubelet(self.control.api, ["node-a", "node-b"], images, logs)
        self.services = Services(self.control.api)
        self.chart = chart_of_1_20(self.folder)

    def release(self, name: str) -> World:
        self.world = World(Cluster(self.control, self.kubelet, self.services), self.chart, name)
        return self.world

    def upgrade(self, *more: dict) -> None:
        self.values = merged(self.values, *more)
        self.world.upgrade(self.values)

    def fault(self) -> str | None:
        """Returns a failure of the Services themselves, which events may not notice."""
        return self.services.fault if self.services else None

    def end(self) -> None:
        if self.keda:
            self.keda.stop()
        if self.load:
            self.load.shape()
        if self.control:
            self.control.end()

    def lost(self, begun: float) -> str:
        """Demands that none of the streams open since `begun` is lost; returns a text about them."""
        streams = self.load.since(begun)
        self.load.judge()
        bad = [one.lost for one in streams if one.lost]
        return expect(not bad, f"{told(streams)}{': ' + bad[0][:200] if bad else ''}")


# === the bundled model ===


def start(stage: Stage) -> str:
    stage.begin()
    version = stage.control.api.ask("GET", "/version")["gitVersion"]
    nodes = wait_until("nodes", stage.kubelet.nodes.all)
    return expect(len(nodes) == 2 and version == "v1.20.2", f"{version}, {len(nodes)} nodes")


def install_demo(stage: Stage) -> str:
    world = stage.release("demo")
    world.install(values("kind-cpu.yaml"))
    world.wait_settled("router", "prefill", "decode", limit=120)
    return f"{len(world.ready())} pods ready"


def test_demo(stage: Stage) -> str:
    wait_until("an endpoint", lambda: stage.services._backs(
        stage.control.api.ask("GET", f"/api/v1/namespaces/demo/services/{stage.world.full}"), "http"))
    stage.world.config.test("demo", timeout=120)
    return "the test's pod succeeded"


def uninstall(stage: Stage) -> str:
    world = stage.world
    world.config.uninstall(world.name, timeout=60)
    try:
        wait_until("nothing is left", lambda: not world.left(), 100)
    except AssertionError:
        raise Failed(f"left: {', '.join(world.left()[:6])}") from None
    stage.control.api.delete(f"/api/v1/namespaces/{world.name}")
    killed, troubles = stage.kubelet.killed, stage.kubelet.troubles
    named = f": {', '.join(killed + troubles)}" if killed or troubles else ""
    return expect(not named, f"nothing left; {len(killed)} pods outlived their grace period{named}")


# === scaled by the HPA controller ===


def install(stage: Stage) -> str:
    world = stage.release("llm")
    world.server_side = False
    stage.values = values("hpa.yaml", OURS)
    world.install(stage.values)
    world.wait_settled("router", "prefill", "decode")
    service = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.external.metrics.k8s.io"

    def available() -> bool:
        said = (stage.control.api.get(service) or {}).get("status", {}).get("conditions", [])
        return any(one["type"] == "Available" and one["status"] == "True" for one in said)

    wait_until("the external metrics API available", available)
    stage.load = Load(world.service())
    # The HPA's minimum is two decode pods; a Deployment begins with one.
    wait_until("its least of decode pods", lambda: len(world.ready("decode")) == 2)
    counts = {name: len(world.ready(name)) for name in ("router", "prefill", "decode")}
    return expect(counts == {"router": 2, "prefill": 1, "decode": 2}, f"{words(counts)}, external metrics available")


def metrics(stage: Stage) -> str:
    path = f"{EXTERNAL}/namespaces/llm/cleave_workers_wanted?labelSelector=pool%3D"

    def asked() -> dict | None:
        try:
            found = {pool: stage.control.api.items(path + pool)[0]["value"] for pool in ("prefill", "decode")}
        except ApiError:
            # A router that has just started answers with an error.
            return None
        return found if found == {"prefill": "1", "decode": "2"} else None

    return words(wait_until("values as the policy has them", asked, 40))


def watch(stage: Stage, held: Callable[[dict[str, int], dict[str, int]], bool], limit: float) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the present replicas, and the maximum so far, once `held` is true of them."""
    most = {"prefill": 0, "decode": 0}

    def look() -> tuple | None:
        now = {pool: stage.world.replicas(pool) for pool in most}
        for pool, count in now.items():
            most[pool] = max(most[pool], count)
        return (now, dict(most)) if held(now, most) else None

    try:
        return wait_until("replicas", look, limit)
    except AssertionError:
        raise Failed(f"at most {most} within {limit:.0f} s; wanted {stage.world.metric('cleave_workers_wanted')}") from None


def quiet(stage: Stage) -> str:
    """Demands that nothing scales under light load, by which routers also learn the length of answers."""
    begun = time.monotonic()
    stage.load.shape(STEADY)
    wait_until("twelve whole streams", lambda: sum(one.whole for one in list(stage.load.streams)) >= 12)
    now = {pool: stage.world.replicas(pool) for pool in MAX}
    return expect(now == {"prefill": 1, "decode": 2}, f"{words(now)}; {stage.lost(begun)}")


def grow_prefill(stage: Stage) -> str:
    begun = time.monotonic()
    stage.load.shape(STEADY, PROMPTS)
    now, _ = watch(stage, lambda now, _: now["prefill"] >= 3, 60)
    stage.world.wait_settled("prefill")
    seen = expect(now["decode"] == 2, f"prefill 1 → {now['prefill']}, decode 2 → {now['decode']}")
    return f"{seen}; {stage.lost(begun)}"


def grow_decode(stage: Stage) -> str:
    begun, before = time.monotonic(), stage.world.replicas("prefill")
    stage.load.shape(STEADY, ANSWERS)
    now, most = watch(stage, lambda now, _: now["decode"] >= 4, 90)
    stage.world.wait_settled("decode")
    seen = expect(most["prefill"] <= before, f"decode 2 → {now['decode']}, prefill {before} → {now['prefill']}")
    return f"{seen}; {stage.lost(begun)}"


def shrink(stage: Stage) -> str:
    begun, moved = time.monotonic(), stage.world.metric("cleave_moves_done_total")
    stage.load.shape(STEADY)
    now, _ = watch(stage, lambda now, _: now == {"prefill": 1, "decode": 2}, 150)
    stage.world.wait_settled("prefill", "decode")
    moved = stage.world.metric("cleave_moves_done_total") - moved
    return f"{words(now)}; {moved:.0f} streams moved while their workers drained; {stage.lost(begun)}"


# === lost, replaced, moved ===


def busiest(stage: Stage, component: str) -> dict:
    """Returns a ready pod that has work."""
    def found() -> dict | None:
        for pod in stage.world.ready(component):
            load = stage.world.running(pod)
            if load:
                return pod
        return None

    return wait_until(f"a busy {component} pod", found, 30)


def kill_worker(stage: Stage) -> str:
    # The steady load replaces that of the events before, which may not have waited until the pools shrank.
    stage.load.shape(STEADY)
    begun, resumed = time.monotonic(), stage.world.metric("cleave_streams_resumed_total")
    pod = busiest(stage, "decode")
    life = stage.kubelet.life(pod)
    life.container.tell(signal.SIGKILL)
    name = pod["metadata"]["name"]

    def back() -> bool:
        (one,) = [one for one in stage.world.pods("decode") if one["metadata"]["name"] == name]
        return is_ready(one) and one["status"]["containerStatuses"][0]["restartCount"] == 1

    wait_until("the container again", back)
    lost = stage.lost(begun)
    resumed = stage.world.metric("cleave_streams_resumed_total") - resumed
    return expect(resumed > 0, f"started again in its pod; {resumed:.0f} streams resumed elsewhere; {lost}")


def remove_worker(stage: Stage) -> str:
    """Deletes pods as `kubectl delete pod --force` does: the object first, the process at once."""
    begun, names = time.monotonic(), {}
    for component in ("prefill", "decode"):
        names[component] = stage.world.names(component)
        pod = stage.world.ready(component)[0]["metadata"]
        stage.control.api.delete(f"/api/v1/namespaces/llm/pods/{pod['name']}", gracePeriodSeconds=0)
    for component, before in names.items():
        wait_until(f"another {component} pod", lambda: stage.world.settled(component) and stage.world.names(component) != before)
    return f"both replaced; {stage.lost(begun)}"


def kill_router(stage: Stage) -> str:
    """Kills a router: its streams break off with an error, and clients retry requests that had no answer yet."""
    begun = time.monotonic()
    pod = busiest(stage, "router")
    open_there = stage.world.running(pod)
    stage.kubelet.life(pod).container.tell(signal.SIGKILL)
    # Streams that begin after this point must not be hurt.
    wait_until("the router again", lambda: stage.world.settled("router"))
    streams = stage.load.since(begun)
    stage.load.judge()
    broken = [one for one in streams if one.lost]
    other = [one.lost for one in broken if "broken=''" in one.lost or "other tokens" in one.lost]
    seen = f"{len(broken)} of {len(streams)} streams broke off, {open_there} were open there; {len(other)} passed for whole"
    for one in broken:
        one.lost = ""
    return expect(0 < len(broken) <= open_there + 2 and not other, seen)


def change_policy(stage: Stage) -> str:
    """Changes only the ConfigMap: no pod is replaced."""
    begun, pods = time.monotonic(), stage.world.names("router")
    before = stage.world.metric("cleave_policy_reloads_total", 'outcome="changed"')
    stage.upgrade({"policy": {"config": policy(tpot_ms=310)}})
    wait_until("both routers follow", lambda: stage.world.metric("cleave_policy_reloads_total", 'outcome="changed"') >= before + 2, 30)
    return expect(stage.world.names("router") == pods, f"both routers read it, no pod replaced; {stage.lost(begun)}")


def reject_policy(stage: Stage) -> str:
    """Gives routers a bad policy, whose keys Helm's schema does not check; they refuse it and keep the present one."""
    begun, good = time.monotonic(), stage.values["policy"]["config"]
    before = stage.world.metric("cleave_policy_reloads_total", 'outcome="rejected"')
    known = stage.world.metric("cleave_workers_wanted")
    stage.upgrade({"policy": {"config": {"default_class": "nobody"}}})
    wait_until("both refuse it", lambda: stage.world.metric("cleave_policy_reloads_total", 'outcome="rejected"') >= before + 2, 30)
    wanted = stage.world.metric("cleave_workers_wanted")
    stage.values["policy"]["config"] = good
    stage.world.config.rollback("llm", timeout=60)
    return expect(wanted == known, f"both refused it and want the workers they wanted; rolled back; {stage.lost(begun)}")


def roll(stage: Stage, components: tuple[str, ...], change: dict) -> str:
    begun, names = time.monotonic(), {one: stage.world.names(one) for one in components}
    stage.upgrade(change)
    for component in components:
        wait_until(f"new {component} pods", lambda: stage.world.settled(component) and not stage.world.names(component) & names[component], 120)
    return f"{sum(map(len, names.values()))} pods replaced; {stage.lost(begun)}"


def roll_workers(stage: Stage) -> str:
    return roll(stage, ("prefill", "decode"), {"workers": {"extraEnv": [{"name": "ROLLED", "value": "1"}]}})


def roll_routers(stage: Stage) -> str:
    return roll(stage, ("router",), {"logLevel": "info,cleave=debug"})


def evict(stage: Stage, pod: str) -> int:
    """Asks for an eviction; returns the status of the answer, 429 if the budget does not allow it now."""
    body = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "llm"}}
    try:
        stage.control.api.ask("POST", f"/api/v1/namespaces/llm/pods/{pod}/eviction", body)
        return 201
    except ApiError as error:
        return error.status


def drain_node(stage: Stage) -> str:
    """Drains a node as `kubectl drain` does: no new pods, and each pod is evicted as soon as its budget allows."""
    begun, refused = time.monotonic(), 0
    api = stage.control.api
    crowded = max(("node-a", "node-b"), key=lambda name: len(stage.world.on(name)))
    api.patch(f"/api/v1/nodes/{crowded}", {"spec": {"unschedulable": True}})
    try:
        budget = f"/apis/policy/v1beta1/namespaces/llm/poddisruptionbudgets/{stage.world.full}-decode"
        wait_until("a disruption allowed", lambda: api.ask("GET", budget)["status"]["disruptionsAllowed"] == 1)
        # The budget refuses to evict two pods of one pool at once, on whichever nodes.
        first, second = (pod["metadata"]["name"] for pod in stage.world.ready("decode")[:2])
        answers = [evict(stage, first), evict(stage, second)]
        while there := stage.world.on(crowded):
            for name in there:
                refused += evict(stage, name) == 429
            if time.monotonic() - begun > 120:
                raise Failed(f"still on {crowded}: {there}")
            time.sleep(1)
        stage.world.wait_settled("router", "prefill", "decode")
    finally:
        api.patch(f"/api/v1/nodes/{crowded}", {"spec": {"unschedulable": None}})
    expect(answers == [201, 429], f"two decode pods at once: {answers}")
    return f"second of a pool answered 429, {refused} times in all while it drained; the node is empty; {stage.lost(begun)}"


# === scaled by KEDA's protocol, from and to nothing ===


def resolve(stage: Stage, host: str) -> list[str]:
    return stage.services._addresses(f"{host}.{DOMAIN}") or []


def to_keda(stage: Stage) -> str:
    begun = time.monotonic()
    add_crd(stage.control.api, ROOT / "testdata/crds/scaledobjects.keda.sh.yaml.gz")
    kinds = {name: stage.values[name]["autoscaling"] | {"type": "keda", "minReplicas": 0} for name in ("prefill", "decode")}
    nothing = {name: {"min": 0, "max": most, "up_after": "2s", "down_after": "5s"} for name, most in MAX.items()}
    wait_until("ScaledObjects served", lambda: stage.control.api.get("/apis/keda.sh/v1alpha1"), 30)
    stage.upgrade({"workers": {"autoscaling": {"type": "keda"}}, **{name: {"autoscaling": kind} for name, kind in kinds.items()},
                   "policy": {"config": policy(pools=nothing, idle_after="8s")}})
    hpas = stage.control.api.items("/apis/autoscaling/v1/horizontalpodautoscalers")
    objects = stage.control.api.items("/apis/keda.sh/v1alpha1/namespaces/llm/scaledobjects")
    expect(not hpas and len(objects) == 2, f"{len(hpas)} HPAs, {len(objects)} ScaledObjects")
    stage.keda = Keda(stage.control.api, "llm", lambda host: resolve(stage, host))
    wait_until("every call answered", lambda: len(stage.keda.answered) == 3 and len([one for one in stage.keda.pushed.values() if one]) == 2, 30)
    stage.world.wait_settled("router")
    return f"no HPA, 2 ScaledObjects; IsActive, GetMetricSpec, GetMetrics, StreamIsActive answered; {stage.lost(begun)}"


def keda_grows(stage: Stage) -> str:
    begun, before = time.monotonic(), {pool: stage.world.replicas(pool) for pool in MAX}
    stage.load.shape(PROMPTS)
    now, most = watch(stage, lambda now, _: now["prefill"] >= 3, 60)
    stage.world.wait_settled("prefill")
    seen = expect(most["decode"] <= before["decode"], f"{words(before)} → {words(now)}")
    return f"{seen}; {stage.lost(begun)}"


def keda_empties(stage: Stage) -> str:
    begun = time.monotonic()
    stage.load.shape()
    now, _ = watch(stage, lambda now, _: now == {"prefill": 0, "decode": 0}, 120)
    stage.world.wait_settled("prefill", "decode")
    pushed = {name.split("-")[-1]: said[-1] for name, said in stage.keda.pushed.items()}
    expect(not any(pushed.values()), f"pushed: {pushed}")
    return f"{words(now)}, pushed inactive; {stage.lost(begun)}"


def keda_from_nothing(stage: Stage) -> str:
    begun = time.monotonic()
    stream: Stream = stage.load.ask(STEADY)
    stage.lost(begun)
    pushed = {name.split("-")[-1]: said[-1] for name, said in stage.keda.pushed.items()}
    seen = f"answered after {stream.ended - begun:.1f} s; pushed active: {words(pushed)}; {stage.keda.differed} of {stage.keda.compared} answers of the two routers differed, for moments"
    return expect(stream.whole and all(pushed.values()), seen)


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    title: str
    expected: str
    run: Callable[[Stage], str]
    # Later events build on this one.
    needed: bool = False
    # The event takes about a minute of load, or of waiting.
    slow: bool = False


EVENTS = (
    Event("start", "control plane starts", "API server 1.20.2, two nodes", start, True),
    Event("install-demo", "`helm install`, kind-cpu.yaml, the bundled model", "every pod ready", install_demo),
    Event("test-demo", "`helm test`", "a completion through the Service", test_demo),
    Event("uninstall-demo", "`helm uninstall`", "no object, process, namespace or mount left", uninstall),
    Event("install", "`helm install`, hpa.yaml", "2 routers, 1 prefill, 2 decode ready; APIService available", install, True),
    Event("metrics", "external metrics through the API server", "wanted: prefill 1, decode 2", metrics),
    Event("quiet", "one stream a second", "nothing changes; 0 streams lost", quiet),
    Event("grow-prefill", "long prompts, short answers", "prefill grows, decode does not; 0 streams lost", grow_prefill),
    Event("grow-decode", "short prompts, long answers", "decode grows, prefill does not; 0 lost", grow_decode, slow=True),
    Event("shrink", "quiet", "both back to their least, drained; 0 lost", shrink, slow=True),
    Event("kill-worker", "SIGKILL of a decode process", "started again; its streams resumed; 0 lost", kill_worker),
    Event("remove", "a prefill and a decode pod removed by force", "replaced; 0 lost", remove_worker),
    Event("policy", "`helm upgrade`, another promise", "followed by both routers, no pod replaced; 0 lost", change_policy),
    Event("bad-policy", "`helm upgrade`, a policy with a mistake, `helm rollback`", "refused, nothing changes; 0 lost", reject_policy),
    Event("roll-workers", "`helm upgrade` of the workers", "every pod new; 0 lost", roll_workers),
    Event("roll-routers", "`helm upgrade` of the routers", "every pod new; 0 lost", roll_routers),
    Event("drain", "a node drained by evictions", "budgets held; the node empty; 0 lost", drain_node),
    Event("kill-router", "SIGKILL of a router", "only its streams break, none passes for whole", kill_router),
    Event("keda", "`helm upgrade` from HPA to KEDA", "HPAs gone, every call answered; 0 lost", to_keda),
    Event("keda-grow", "long prompts, short answers", "prefill grows, decode does not; 0 lost", keda_grows, slow=True),
    Event("keda-empty", "no request", "no worker left; 0 lost", keda_empties, slow=True),
    Event("keda-nothing", "one request to an empty fleet", "pushed active, workers start, answered", keda_from_nothing, slow=True),
    Event("uninstall", "`helm uninstall`", "no object, process, namespace or mount left", uninstall),
)
