"""Objects broken on purpose: (rule that must notice, values over those of a cluster, change that breaks the
objects)."""

from collections.abc import Callable

from variants import ON_PROCESSOR, VARIANTS

HPA = {pool: {"autoscaling": {"type": "hpa"}} for pool in ("prefill", "decode")}
KEDA = {pool: {"autoscaling": {"type": "keda"}} for pool in ("prefill", "decode")}
GROUPS = {"workers": {"leaderWorkerSet": {"enabled": True, "size": 2}}}
PROCESSOR = {"workers": ON_PROCESSOR}
OFFLOADING = {"workers": VARIANTS["offloading to claims of pods"]["workers"]}
PICKER = {
    "inferencePool": {"enabled": True},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
}
Objects = list[dict]


def one(objects: Objects, kind: str, name: str = "") -> dict:
    return next(
        document for document in objects if document["kind"] == kind and document["metadata"]["name"].endswith(name)
    )


def pod(objects: Objects, name: str) -> dict:
    return one(objects, "Deployment", name)["spec"]["template"]["spec"]


def container(objects: Objects, name: str) -> dict:
    return pod(objects, name)["containers"][0]


def argument(objects: Objects, name: str, before: str, after: str) -> None:
    args = container(objects, name)["args"]
    args[:] = [arg.replace(before, after) for arg in args]


def as_keda(objects: Objects) -> None:
    hpa = one(objects, "HorizontalPodAutoscaler")
    objects.append(
        {
            **hpa,
            "kind": "ScaledObject",
            "spec": {
                **hpa["spec"],
                "advanced": {},
                "triggers": [{"metadata": {"scalerAddress": "prod-cleave-router.llm.svc:8000"}}],
            },
        }
    )


BROKEN: list[tuple[str, dict, Callable[[Objects], object]]] = [
    ("one_scaler_each", HPA, as_keda),
    ("one_scaler_each", HPA, lambda o: one(o, "Deployment", "prefill")["spec"].update(replicas=3)),
    ("one_scaler_each", {}, lambda o: one(o, "Deployment", "prefill")["spec"].pop("replicas")),
    ("one_scaler_each", KEDA, lambda o: one(o, "ScaledObject")["spec"]["scaleTargetRef"].update(name="prefill")),
    (
        "groups_are_counted_as_groups",
        {**HPA, **GROUPS},
        lambda o: one(o, "HorizontalPodAutoscaler")["spec"]["metrics"][0]["external"]["target"].update(
            averageValue="1"
        ),
    ),
    (
        "groups_are_counted_as_groups",
        {**KEDA, **GROUPS},
        lambda o: one(o, "ScaledObject")["spec"]["advanced"].pop("scalingModifiers"),
    ),
    ("bounds_agree", {**KEDA, **GROUPS}, lambda o: one(o, "ScaledObject")["spec"].update(maxReplicaCount=9)),
    ("bounds_agree", HPA, lambda o: one(o, "ConfigMap", "policy")["data"].update({"policy.yaml": "default_class: a"})),
    ("devices_are_quoted", {}, lambda o: container(o, "decode")["resources"]["limits"].update({"nvidia.com/gpu": 1})),
    ("devices_are_quoted", {}, lambda o: argument(o, "decode", "--device=cuda", "--device=cpu")),
    ("environment_is_text", {}, lambda o: container(o, "decode")["env"].append({"name": "N", "value": 1})),
    ("pods_have_no_rights", {}, lambda o: container(o, "router")["securityContext"].pop("readOnlyRootFilesystem")),
    (
        "pods_have_no_rights",
        {},
        lambda o: container(o, "prefill")["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    ),
    ("pods_have_no_rights", {}, lambda o: pod(o, "prefill").update(automountServiceAccountToken=True)),
    ("ports_exist", {}, lambda o: container(o, "router")["livenessProbe"]["httpGet"].update(port="metrics")),
    ("ports_exist", {}, lambda o: container(o, "prefill").pop("startupProbe")),
    ("ports_exist", {}, lambda o: argument(o, "prefill", ":7000", ":7001")),
    (
        "services_reach_pods",
        {},
        lambda o: one(o, "Service", "decode")["spec"]["selector"].update({"app.kubernetes.io/component": "decoder"}),
    ),
    ("services_reach_pods", {}, lambda o: one(o, "Service", "router")["spec"]["ports"][0].update(targetPort="web")),
    (
        "selectors_are_apart",
        {},
        lambda o: one(o, "Deployment", "decode")["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
    ),
    (
        "selectors_are_apart",
        {},
        lambda o: one(o, "PodDisruptionBudget", "decode")["spec"]["selector"]["matchLabels"].pop(
            "app.kubernetes.io/component"
        ),
    ),
    ("every_pod_has_a_policy", {}, lambda o: o.remove(one(o, "NetworkPolicy", "workers"))),
    ("every_pod_has_a_policy", {}, lambda o: one(o, "NetworkPolicy", "workers")["spec"]["ingress"].pop()),
    ("flags_exist", {}, lambda o: argument(o, "router", "--drain-timeout", "--drain-seconds")),
    ("flags_exist", {}, lambda o: argument(o, "prefill", "worker", "work")),
    (
        "flags_exist",
        {"model": {"uri": "hf://org/Model-8B"}},
        lambda o: pod(o, "prefill")["initContainers"][0]["args"].insert(1, "--if-missing"),
    ),
    ("within_their_resources", PROCESSOR, lambda o: argument(o, "decode", "--threads=4", "--threads=5")),
    ("within_their_resources", PROCESSOR, lambda o: argument(o, "decode", "--threads=", "--thread=")),
    ("within_their_resources", {}, lambda o: container(o, "decode")["args"].append("--threads=8")),
    ("within_their_resources", OFFLOADING, lambda o: argument(o, "decode", "-size=4Gi", "-size=16Gi")),
    ("within_their_resources", OFFLOADING, lambda o: argument(o, "decode", "-size=4Gi", "-size=8Gi")),
    ("storage_holds_its_files", OFFLOADING, lambda o: argument(o, "decode", "-dir-size=16Gi", "-dir-size=21Gi")),
    ("storage_holds_its_files", OFFLOADING, lambda o: pod(o, "decode")["volumes"].pop()),
    ("storage_holds_its_files", OFFLOADING, lambda o: argument(o, "decode", "--packed-cache", "--cached")),
    ("storage_holds_its_files", OFFLOADING, lambda o: argument(o, "decode", "offloading-size", "size")),
    ("storage_holds_its_files", OFFLOADING, lambda o: one(o, "PersistentVolumeClaim")["metadata"].update(name="other")),
    ("images_have_one_version", {}, lambda o: container(o, "router").update(image="cleave:1@sha256:0")),
    ("images_have_one_version", {}, lambda o: container(o, "router").update(image="cleave")),
    ("drains_in_time", {}, lambda o: pod(o, "decode").update(terminationGracePeriodSeconds=30)),
    ("routers_are_found", {}, lambda o: argument(o, "decode", "cleave-router.llm", "cleave-routers.llm")),
    ("routers_are_found", {}, lambda o: one(o, "Service", "router")["spec"].pop("publishNotReadyAddresses")),
    ("volumes_are_used", {}, lambda o: container(o, "router")["volumeMounts"][0].update(subPath="policy.yaml")),
    ("volumes_are_used", {}, lambda o: pod(o, "decode")["volumes"].pop()),
    ("volumes_are_used", {}, lambda o: argument(o, "router", "/etc/cleave/policy/", "/etc/policy/")),
    (
        "routes_lead_somewhere",
        {},
        lambda o: one(o, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"].update(name="web"),
    ),
    (
        "routes_lead_somewhere",
        PICKER,
        lambda o: one(o, "InferencePool")["spec"]["endpointPickerRef"]["port"].update(number=9003),
    ),
    ("routes_lead_somewhere", HPA, lambda o: one(o, "APIService")["spec"]["service"].update(name="prod-cleave-router")),
    (
        "routes_lead_somewhere",
        VARIANTS["gateways that verify routers"],
        lambda o: one(o, "BackendTLSPolicy")["spec"]["targetRefs"][0].update(sectionName="https"),
    ),
    (
        "routes_lead_somewhere",
        VARIANTS["gateways that verify routers"],
        lambda o: argument(o, "router", "--ssl-certfile", "--ssl-cert"),
    ),
    (
        "schema",
        VARIANTS["gateways that verify routers"],
        lambda o: one(o, "BackendTLSPolicy")["spec"]["validation"].update(wellKnownCACertificates="All"),
    ),
    (
        "pickers_are_spoken_to",
        PICKER,
        lambda o: one(o, "Service", "cleave")["spec"]["ports"][1].update(appProtocol="kubernetes.io/h2c"),
    ),
    ("pickers_are_spoken_to", PICKER, lambda o: argument(o, "router", "-admin-port=8001", "-admin-port=8000")),
    (
        "pickers_are_spoken_to",
        {**PICKER, "networkPolicy": {"monitoring": [{"namespaceSelector": {}}]}},
        lambda o: one(o, "NetworkPolicy", "router")["spec"]["ingress"][1]["from"].pop(),
    ),
    ("everything_is_scraped", {}, lambda o: one(o, "Service", "decode")["metadata"]["labels"].pop("cleave/scraped")),
    ("names_and_labels", {}, lambda o: o.append(one(o, "Service"))),
    ("names_and_labels", {}, lambda o: one(o, "ConfigMap")["metadata"].pop("namespace")),
    (
        "nothing_stops_before_its_successor",
        {},
        lambda o: one(o, "Deployment", "router")["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1),
    ),
    ("schema", {}, lambda o: pod(o, "router").update(restartpolicy="Always")),
    ("schema", {}, lambda o: one(o, "ServiceMonitor")["spec"]["endpoints"][0].update(intervall="5s")),
    ("schema", KEDA, lambda o: one(o, "ScaledObject")["spec"].update(minReplicas=1)),
    ("schema", GROUPS, lambda o: one(o, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"].update(size="2")),
    ("schema", PICKER, lambda o: one(o, "InferencePool")["spec"]["endpointPickerRef"].update(failureMode="Open")),
    ("schema", PICKER, lambda o: one(o, "HTTPRoute")["spec"]["rules"][0]["timeouts"].update(request="soon")),
    ("schema", HPA, lambda o: one(o, "APIService")["spec"].update(priority=1)),
]
