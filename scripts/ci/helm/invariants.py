"""Rules that hold for the chart's objects under any values, and that a schema cannot express.

Owns: these rules, each a generator of flaws over the objects of one rendering. Never: renders, or looks at values.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import yaml

WORKLOADS = {"Deployment", "LeaderWorkerSet"}
SCALERS = {"HorizontalPodAutoscaler", "ScaledObject"}
# Flags that only the variants of check.py set, as a user would.
OF_VARIANTS = {"--runner", "--kv-cache"}


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


def containers(pod: dict) -> Iterator[dict]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def arguments(pod: dict) -> dict[str, str]:
    args = pod["spec"]["containers"][0].get("args", [])
    return dict(arg.split("=", 1) for arg in args if "=" in arg)


def ports(pod: dict) -> dict[str, int]:
    """Returns the ports of the first container, which is Cleave's; others are the user's."""
    return {port["name"]: port["containerPort"] for port in pod["spec"]["containers"][0].get("ports", [])}


def one_scaler_each(world: World) -> Iterator[str]:
    targets: dict[tuple, list[str]] = {}
    for scaler in world.of(*SCALERS):
        to = scaler["spec"]["scaleTargetRef"]
        targets.setdefault((to["kind"], to["name"]), []).append(scaler["kind"])
        if not world.named(to["kind"], to["name"]):
            yield f"{scaler['kind']} {scaler['metadata']['name']} scales {to['kind']} {to['name']}, which is not there"
    for target, kinds in targets.items():
        if len(kinds) > 1:
            yield f"{target} is scaled by {kinds}"
    if len({scaler["kind"] for scaler in world.of(*SCALERS)}) > 1:
        yield "an HPA and a ScaledObject want the cluster's one external metrics API"
    for workload in world.of(*WORKLOADS):
        scaled = (workload["kind"], workload["metadata"]["name"]) in targets
        if scaled == ("replicas" in workload["spec"]):
            yield f"{workload['metadata']['name']}: replicas belong to the autoscaler, and to the chart without one"


def groups_are_counted_as_groups(world: World) -> Iterator[str]:
    """Autoscalers count groups for a LeaderWorkerSet: the router counts workers."""
    for scaler in world.of(*SCALERS):
        to = scaler["spec"]["scaleTargetRef"]
        target = world.named(to["kind"], to["name"]) or {}
        size = target["spec"]["leaderWorkerTemplate"]["size"] if to["kind"] == "LeaderWorkerSet" else 1
        if scaler["kind"] == "ScaledObject":
            formula = scaler["spec"]["advanced"].get("scalingModifiers", {}).get("formula", "wanted / 1")
            told = int(formula.removeprefix("wanted / "))
        else:
            told = int(scaler["spec"]["metrics"][0]["external"]["target"]["averageValue"])
        if told != size:
            yield f"{scaler['metadata']['name']}: {told} workers to a replica, which has {size}"


def bounds_agree(world: World) -> Iterator[str]:
    """The policy's `scaling` has the bounds of the autoscaler."""
    policies = [
        yaml.safe_load(one["data"]["policy.yaml"]) for one in world.of("ConfigMap") if "policy.yaml" in one["data"]
    ]
    for policy, scaler in ((policy, scaler) for policy in policies for scaler in world.of(*SCALERS)):
        to, spec = scaler["spec"]["scaleTargetRef"], scaler["spec"]
        target = world.named(to["kind"], to["name"])
        if not target:
            continue
        size = target["spec"]["leaderWorkerTemplate"]["size"] if to["kind"] == "LeaderWorkerSet" else 1
        template = target["spec"].get("template") or target["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        served = arguments(template).get("--served-model-name")
        listed = next((model for model in policy.get("models", []) if model["name"] == served), policy)
        pool = listed.get("scaling", policy.get("scaling", {})).get("pools", {}).get(to["name"].rsplit("-", 1)[1], {})
        least, most = (spec.get(f"{end}Replicas", spec.get(f"{end}ReplicaCount", -1)) * size for end in ("min", "max"))
        if (pool.get("min"), pool.get("max")) != (least, most):
            yield f"{scaler['metadata']['name']}: from {least} to {most}, and the policy says {pool}"


def devices_are_quoted(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        name = document["metadata"]["name"]
        for container in containers(pod):
            resources = container.get("resources", {})
            for kind in ("requests", "limits"):
                for resource, amount in resources.get(kind, {}).items():
                    if not isinstance(amount, str):
                        yield f"{name}: {kind}.{resource} is {amount!r}, not a string"
        limits = pod["spec"]["containers"][0]["resources"].get("limits", {})
        has_gpu = any("gpu" in resource or "mig-" in resource for resource in limits)
        if "--device" in arguments(pod) and has_gpu != (arguments(pod)["--device"] == "cuda"):
            yield f"{name}: --device={arguments(pod)['--device']}, with limits {sorted(limits)}"


def environment_is_text(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        for container in containers(pod):
            names = [variable["name"] for variable in container.get("env", [])]
            if len(names) != len(set(names)):
                yield f"{document['metadata']['name']}: a variable is set twice: {names}"
            for variable in container.get("env", []):
                if "value" in variable and not isinstance(variable["value"], str):
                    yield f"{document['metadata']['name']}: {variable['name']} is {variable['value']!r}, not a string"


def pods_have_no_rights(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        name, spec = document["metadata"]["name"], pod["spec"]
        if spec.get("automountServiceAccountToken") is not False or spec.get("enableServiceLinks") is not False:
            yield f"{name}: a token or service variables are mounted"
        if spec["securityContext"].get("runAsNonRoot") is not True:
            yield f"{name}: may run as root"
        for container in containers(pod):
            context = container.get("securityContext", {})
            tight = (
                context.get("allowPrivilegeEscalation") is False
                and context.get("readOnlyRootFilesystem") is True
                and context.get("runAsNonRoot") is True
                and context.get("capabilities", {}).get("drop") == ["ALL"]
                and set(context["capabilities"].get("add", [])) <= {"IPC_LOCK"}
                and context.get("seccompProfile", {}).get("type") == "RuntimeDefault"
            )
            if not tight:
                yield f"{name}: container {container['name']} is not restricted: {context}"
    if world.of("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "Secret"):
        yield "the chart makes a role or a secret"
    for account in world.of("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{account['metadata']['name']}: its token is mounted"


def ports_exist(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        name, there = document["metadata"]["name"], ports(pod)
        for container in pod["spec"]["containers"][:1]:
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if document["kind"] != "Pod" and probe not in container:
                    yield f"{name}: no {probe}"
                port = container.get(probe, {}).get("httpGet", {}).get("port", "admin")
                if probe in container and port not in there:
                    yield f"{name}: {probe} asks port {port}, which is not there"
        heard = {int(value.rsplit(":", 1)[1]) for flag, value in arguments(pod).items() if "listen" in flag}
        if document["kind"] in WORKLOADS and heard != set(there.values()):
            yield f"{name}: listens on {sorted(heard)}, declares {there}"
        if len(set(there.values())) != len(there):
            yield f"{name}: a port twice: {there}"


def services_reach_pods(world: World) -> Iterator[str]:
    for service in world.of("Service"):
        name = service["metadata"]["name"]
        chosen = world.selected(service["spec"]["selector"])
        if len(chosen) != 1:
            yield f"service {name} selects {len(chosen)} workloads"
        for _, pod in chosen:
            for port in service["spec"]["ports"]:
                if port["targetPort"] not in ports(pod):
                    yield f"service {name}: no port {port['targetPort']} in its pods"


def selectors_are_apart(world: World) -> Iterator[str]:
    for workload in world.of("Deployment"):
        labels = workload["spec"]["selector"]["matchLabels"]
        chosen = [document["metadata"]["name"] for document, _ in world.selected(labels)]
        if chosen != [workload["metadata"]["name"]]:
            yield f"{workload['metadata']['name']} selects the pods of {chosen}"
    for budget in world.of("PodDisruptionBudget"):
        if len(world.selected(budget["spec"]["selector"]["matchLabels"])) != 1:
            yield f"budget {budget['metadata']['name']} covers other than one workload"
    for document, pod in world.pods:
        for spread in pod["spec"].get("topologySpreadConstraints", []):
            if not within(spread["labelSelector"].get("matchLabels", {}), pod["metadata"]["labels"]):
                yield f"{document['metadata']['name']}: spreads over pods that are not its own"


def every_pod_has_a_policy(world: World) -> Iterator[str]:
    policies = world.of("NetworkPolicy")
    for document, pod in world.pods if policies else []:
        labels, kind = pod["metadata"]["labels"], document["kind"]
        chosen = [one for one in policies if selects(one["spec"]["podSelector"], labels)]
        if kind in WORKLOADS and len(chosen) != 1:
            yield f"{document['metadata']['name']}: {len(chosen)} network policies"
        for policy in chosen:
            opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
            if kind in WORKLOADS and opened != set(ports(pod).values()):
                yield f"{policy['metadata']['name']} opens {sorted(opened)}, its pods have {ports(pod)}"


def selects(selector: dict, labels: dict) -> bool:
    among = all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))
    return among and within(selector.get("matchLabels", {}), labels)


def command_lines(pod: dict) -> Iterator[list[str]]:
    """Returns the command lines of the binary: of the first container, and of those that download models."""
    for container in containers(pod):
        if container is pod["spec"]["containers"][0] or container["name"].startswith("pull-"):
            yield container["args"]


def flags_exist(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        for args in command_lines(pod):
            words = " ".join(takewhile(lambda arg: not arg.startswith("-"), args))
            known = world.flags.get(words)
            if known is None:
                yield f"{document['metadata']['name']}: no command `{words}`"
                continue
            for arg in args:
                if arg.startswith("-") and arg.split("=")[0] not in known:
                    yield f"{document['metadata']['name']}: `cleave {words}` has no {arg.split('=')[0]}"


def own_flags(document: dict) -> Iterator[tuple[str, set[str]]]:
    """Yields the command of a workload's first container, and the flags that it has."""
    if document["kind"] in WORKLOADS:
        args = template(document)["spec"]["containers"][0]["args"]
        yield args[0], {arg.split("=")[0] for arg in args[1:]} - OF_VARIANTS


def number(quantity: str) -> float:
    """Returns a quantity of Kubernetes as a number; `GiB`, as Cleave writes sizes, is `Gi`."""
    digits, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity.removesuffix("B")).groups()
    powers = {"": 1, "m": 1e-3} | {letter: 1000**power for power, letter in enumerate("kMGTPE", 1)}
    return float(digits) * (powers | {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", 1)})[unit]


def within_their_resources(world: World) -> Iterator[str]:
    """There are no more threads than cores, and host memory is part of the pod's."""
    for document, pod in world.pods:
        name, args = document["metadata"]["name"], arguments(pod)
        resources = pod["spec"]["containers"][0]["resources"]
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        cores = limits.get("cpu", requests.get("cpu"))
        if args.get("--device") == "cpu" and cores:
            threads = int(args.get("--threads", 0))
            if not 0 < threads <= max(1, number(cores)):
                yield f"{name}: {threads} threads on {cores} cores"
        if args.get("--device") == "cuda" and "--threads" in args:
            yield f"{name}: threads for a GPU"
        held = number(args.get("--kv-offloading-size", "0"))
        for kind, memory in (("limits", limits.get("memory")), ("requests", requests.get("memory"))):
            if held and memory and held >= number(memory):
                yield f"{name}: {held} bytes of host memory, and {kind} of {memory}"


def storage_holds_its_files(world: World) -> Iterator[str]:
    """Volumes of a pod alone are as large as the file limit, and claims of the release exist."""
    for document, pod in world.pods:
        name, args = document["metadata"]["name"], arguments(pod)
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
        if ("--kv-offloading-dir" in args) != ("kv-offloading" in volumes):
            yield f"{name}: a folder for blocks without a volume, or the other way"
        if ("--packed-cache" in args) != ("packed-cache" in volumes):
            yield f"{name}: a folder for packed weights without a volume, or the other way"
        if "--kv-offloading-dir" in args and "--kv-offloading-size" not in args:
            yield f"{name}: blocks reach the disk only through host memory"
        volume = volumes.get("kv-offloading", {})
        size = volume.get("emptyDir", {}).get("sizeLimit")
        if "ephemeral" in volume:
            size = volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"]
        if size and number(size) < number(args["--kv-offloading-dir-size"]):
            yield f"{name}: files of {args['--kv-offloading-dir-size']} in a volume of {size}"
    made = {claim["metadata"]["name"] for claim in world.of("PersistentVolumeClaim")}
    used = {
        volume.get("persistentVolumeClaim", {}).get("claimName")
        for _, pod in world.pods
        for volume in pod["spec"].get("volumes", [])
    }
    if made - used:
        yield f"claims that no pod mounts: {made - used}"


def images_have_one_version(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        image = pod["spec"]["containers"][0]["image"]
        if not re.fullmatch(r"[^@]+(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9._-]{0,127})", image):
            yield f"{document['metadata']['name']}: image {image}"


def drains_in_time(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        args = arguments(pod)
        if document["kind"] in WORKLOADS:
            needed = int(args.get("--drain-timeout", -100)) + int(args.get("--shutdown-delay", 0))
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            if not needed + 5 <= grace <= needed + 60:
                yield f"{document['metadata']['name']}: drains for {needed} s, is killed after {grace} s"


def routers_are_found(world: World) -> Iterator[str]:
    """Workers and KEDA use a headless name that also has unready routers: only workers make a router ready."""
    words = [arguments(pod) for _, pod in world.pods]
    told = [args[flag] for args in words for flag in ("--router", "--picker-endpoints") if flag in args]
    for scaler in world.of("ScaledObject"):
        told.append(scaler["spec"]["triggers"][0]["metadata"]["scalerAddress"])
    for address in told:
        host, port = address.rsplit(":", 1)
        name, namespace = host.split(".")[:2]
        service = world.named("Service", name)
        if not service or service["metadata"]["namespace"] != namespace:
            yield f"{address}: no such service"
            continue
        spec = service["spec"]
        if spec.get("clusterIP") != "None" or spec.get("publishNotReadyAddresses") is not True:
            yield f"{address}: not headless, or without those that are not ready"
        if int(port) not in [one["port"] for one in spec["ports"]]:
            yield f"{address}: the service has no such port"


def volumes_are_used(world: World) -> Iterator[str]:
    for document, pod in world.pods:
        name = document["metadata"]["name"]
        mounts = [mount for container in containers(pod) for mount in container.get("volumeMounts", [])]
        if {mount["name"] for mount in mounts} != {volume["name"] for volume in pod["spec"].get("volumes", [])}:
            yield f"{name}: volumes and mounts differ"
        if any("subPath" in mount for mount in mounts):
            yield f"{name}: a file mounted by subPath does not follow its ConfigMap or Secret"
        places = [mount["mountPath"] for mount in mounts]
        for value in arguments(pod).values():
            folder = value if value.startswith("/") else ""
            if folder and not any(folder == place or folder.startswith(f"{place}/") for place in places):
                yield f"{name}: {folder} is on no volume"


def routes_lead_somewhere(world: World) -> Iterator[str]:
    for ingress in world.of("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                back = path["backend"]["service"]
                service = world.named("Service", back["name"])
                if not service or back["port"]["name"] not in [one["name"] for one in service["spec"]["ports"]]:
                    yield f"ingress leads to {back}"
    for policy in world.of("BackendTLSPolicy"):
        for to in policy["spec"]["targetRefs"]:
            target = world.named(to["kind"], to["name"])
            named = [one["name"] for one in target["spec"].get("ports", [])] if target else []
            if not target or "sectionName" in to and to["sectionName"] not in named:
                yield f"a gateway's TLS is for {to}"
        if not any("--ssl-certfile" in arguments(pod) for _, pod in world.pods):
            yield "gateways speak TLS to routers without a certificate"
    for route in world.of("HTTPRoute"):
        for back in route["spec"]["rules"][0]["backendRefs"]:
            service = world.named(back.get("kind", "Service"), back["name"])
            listed = service and back.get("port") in [one.get("port") for one in service["spec"].get("ports", [{}])]
            if not listed:
                yield f"route leads to {back}"
    for pool in world.of("InferencePool"):
        chosen = world.selected(pool["spec"]["selector"]["matchLabels"])
        numbers = {port["number"] for port in pool["spec"]["targetPorts"]}
        if len(chosen) != 1 or not numbers <= set(ports(chosen[0][1]).values()):
            yield "the inference pool's endpoints are not the routers"
        picker = pool["spec"]["endpointPickerRef"]
        service = world.named("Service", picker["name"])
        if not service or picker["port"]["number"] not in [one["port"] for one in service["spec"]["ports"]]:
            yield f"the inference pool's picker is {picker}"
    for api in world.of("APIService"):
        service = world.named("Service", api["spec"]["service"]["name"])
        if not service or service["spec"].get("clusterIP") == "None":
            yield "the API server asks a service without an address"


def pickers_are_spoken_to(world: World) -> Iterator[str]:
    """Gateways get the TLS mode of the picker, and a picker reaches the routers' admin port."""
    for _, pod in world.pods:
        args, there = arguments(pod), ports(pod)
        if "--ext-proc-listen" not in args:
            continue
        for service in world.of("Service"):
            for port in service["spec"]["ports"]:
                told = port.get("appProtocol") == "kubernetes.io/h2c"
                if port["targetPort"] == "ext-proc" and told != (args.get("--ext-proc-tls") == "off"):
                    yield f"service {service['metadata']['name']}: its picker's appProtocol is {port.get('appProtocol')}"
        if args.get("--picker-admin-port") != str(there["admin"]):
            yield f"the picker asks port {args.get('--picker-admin-port')}, the routers' is {there['admin']}"
        for policy in world.of("NetworkPolicy"):
            if not selects(policy["spec"]["podSelector"], pod["metadata"]["labels"]):
                continue
            out = {one["port"] for rule in policy["spec"]["egress"] if "to" in rule for one in rule["ports"]}
            come = [rule for rule in policy["spec"]["ingress"] if there["admin"] in [one["port"] for one in rule["ports"]]]
            peers = [peer.get("podSelector") for rule in come for peer in rule["from"]]
            let_in = any(one is not None and selects(one, pod["metadata"]["labels"]) for one in peers)
            if there["admin"] not in out or not let_in:
                yield f"{policy['metadata']['name']}: routers cannot ask each other at port {there['admin']}"


def everything_is_scraped(world: World) -> Iterator[str]:
    for monitor in world.of("ServiceMonitor"):
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [one for one in world.of("Service") if within(labels, one["metadata"]["labels"])]
        scraped = [
            name
            for one in services
            for name in (d["metadata"]["name"] for d, _ in world.selected(one["spec"]["selector"]))
        ]
        if sorted(scraped) != sorted(one["metadata"]["name"] for one in world.of(*WORKLOADS)):
            yield f"scraped are {scraped}"
        for service in services:
            if monitor["spec"]["endpoints"][0]["port"] not in [one["name"] for one in service["spec"]["ports"]]:
                yield f"service {service['metadata']['name']} has no port to scrape"


def names_and_labels(world: World) -> Iterator[str]:
    seen = set()
    for document in world.objects:
        metadata = document["metadata"]
        key = (document["kind"], metadata["name"])
        if key in seen:
            yield f"{key} twice"
        seen.add(key)
        if document["kind"] != "APIService" and "namespace" not in metadata:
            yield f"{key} has no namespace"
        if len(metadata["name"]) > 63 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", metadata["name"]):
            yield f"{key} has no name that Kubernetes takes"
        if metadata.get("labels", {}).get("app.kubernetes.io/managed-by") != "Helm":
            yield f"{key} has not the usual labels"


def nothing_stops_before_its_successor(world: World) -> Iterator[str]:
    """A rollout begins with a new pod by default: the number of routers never falls."""
    for document, pod in world.pods:
        if document["kind"] == "Deployment" and arguments(pod).get("--policy"):
            update = document["spec"]["strategy"].get("rollingUpdate", {})
            if update.get("maxUnavailable") != 0:
                yield f"{document['metadata']['name']}: may have fewer routers during a rollout"


RULES = [
    one_scaler_each,
    groups_are_counted_as_groups,
    bounds_agree,
    devices_are_quoted,
    environment_is_text,
    pods_have_no_rights,
    ports_exist,
    services_reach_pods,
    selectors_are_apart,
    every_pod_has_a_policy,
    flags_exist,
    within_their_resources,
    storage_holds_its_files,
    images_have_one_version,
    drains_in_time,
    routers_are_found,
    volumes_are_used,
    routes_lead_somewhere,
    pickers_are_spoken_to,
    everything_is_scraped,
    names_and_labels,
    nothing_stops_before_its_successor,
]


def flaws(world: World) -> list[str]:
    return [f"{rule.__name__}: {flaw}" for rule in RULES for flaw in rule(world)]
