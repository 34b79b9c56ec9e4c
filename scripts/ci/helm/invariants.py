"""Rules that hold for the chart's objects under any values, and that a schema cannot express.

Owns: these rules, each a generator of flaws over the objects of one rendering; those of pods alone are in pod_rules.py.
Never: renders, or looks at values.
"""

import re
from collections.abc import Iterator

import pod_rules
import yaml
from rendered import WORKLOADS, World, arguments, ports, selects, template, within

SCALERS = {"HorizontalPodAutoscaler", "ScaledObject"}


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
    pod_rules.devices_are_quoted,
    pod_rules.environment_is_text,
    pod_rules.pods_have_no_rights,
    pod_rules.ports_exist,
    services_reach_pods,
    selectors_are_apart,
    every_pod_has_a_policy,
    pod_rules.flags_exist,
    pod_rules.within_their_resources,
    pod_rules.storage_holds_its_files,
    pod_rules.images_have_one_version,
    pod_rules.drains_in_time,
    routers_are_found,
    pod_rules.volumes_are_used,
    routes_lead_somewhere,
    pickers_are_spoken_to,
    everything_is_scraped,
    names_and_labels,
    nothing_stops_before_its_successor,
]


def flaws(world: World) -> list[str]:
    return [f"{rule.__name__}: {flaw}" for rule in RULES for flaw in rule(world)]
