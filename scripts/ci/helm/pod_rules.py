"""Rules that hold for the chart's pods under any values: a part of those of invariants.py."""

import re
from collections.abc import Iterator
from itertools import takewhile

from rendered import WORKLOADS, World, arguments, containers, number, ports, template

# Flags that only the variants and values files set, as a user would.
OF_VARIANTS = {"--runner", "--kv-cache"}


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
