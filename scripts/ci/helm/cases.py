"""Values, and exactly what the chart makes of them: generators of flaws.

Owns: values whose outcome is known beforehand. Never: rules that hold for any values (invariants.py).
"""

import re
from collections.abc import Iterator

import engine
import invariants
import schemas
import yaml
from rendered import World
from variants import MORE


def mixed_pools(values: dict, pools: list[dict]) -> list[dict]:
    """Renders a model with a mixed pool for each of these values; returns the pods' first containers."""
    off = {role: {"enabled": False} for role in ("prefill", "decode")}
    models = [{"name": f"m{index}", "both": {"enabled": True} | pool, **off} for index, pool in enumerate(pools)]
    objects = engine.objects(engine.render(engine.merged(values, {"models": models}), "1.31"))
    found = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Deployment"}
    names = [f"prod-cleave-m{index}-both" for index in range(len(pools))]
    return [found[name]["spec"]["template"]["spec"]["containers"][0] for name in names]


def threads_follow_resources() -> Iterator[str]:
    """Compares the threads of pools with the whole cores of their CPU limit, or of the request without one."""
    cases = [
        ({"requests": {"cpu": "2"}}, 0, "2"),
        ({"requests": {"cpu": "3900m"}}, 0, "3"),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "7.5"}}, 0, "7"),
        ({"requests": {"cpu": "250m"}}, 0, "1"),
        ({"requests": {"cpu": "1"}, "limits": {"cpu": "8"}}, 6, "6"),
        ({"requests": {"cpu": None}}, 0, None),
    ]
    pools = mixed_pools({}, [{"resources": resources, "threads": threads} for resources, threads, _ in cases])
    for (resources, threads, expected), container in zip(cases, pools, strict=True):
        got = dict(arg.split("=", 1) for arg in container["args"] if "=" in arg).get("--threads")
        if got != expected:
            yield f"threads: {threads} and {resources} give --threads={got}, not {expected}"


def images_follow_values() -> Iterator[str]:
    """Compares images of pools: a digest counts before the tag, and only for the repository that it is of."""
    one, other = (f"sha256:{digit * 64}" for digit in "ab")
    common = {"image": {"repository": "registry:5000/cleave", "tag": "1", "digest": one}}
    cases = [
        ({}, f"registry:5000/cleave@{one}"),
        ({"tag": "1-cuda"}, "registry:5000/cleave:1-cuda"),
        ({"repository": "cuda"}, "cuda:1"),
        ({"tag": "1-cuda", "digest": other}, f"registry:5000/cleave@{other}"),
        ({"repository": "cuda", "digest": other}, f"cuda@{other}"),
    ]
    pools = mixed_pools(common, [{"image": image} for image, _ in cases])
    for (image, expected), container in zip(cases, pools, strict=True):
        if container["image"] != expected:
            yield f"image: {image} gives {container['image']}, not {expected}"


def additions_arrive() -> Iterator[str]:
    """Compares what pods have with what a user adds to routers and pools, and replaces for one pool."""
    layers = {"router": MORE, "workers": MORE, "decode": {"extraEnv": [], "extraContainers": []}}
    objects = list(engine.objects(engine.render(layers, "1.31")))
    for name in ("router", "prefill", "decode"):
        spec = next(one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith(name))
        pod = spec["spec"]["template"]["spec"]
        main, wanted = pod["containers"][0], engine.merged(MORE, layers.get(name, {}))
        there = {
            "extraEnv": main["env"],
            "extraEnvFrom": main.get("envFrom", []),
            "extraVolumes": pod["volumes"],
            "extraVolumeMounts": main["volumeMounts"],
            "extraContainers": pod["containers"][1:],
            "extraInitContainers": pod.get("initContainers", []),
        }
        if (pod.get("schedulerName"), pod.get("priorityClassName")) != (MORE["schedulerName"], MORE["priorityClassName"]):
            yield f"{name}: scheduler {pod.get('schedulerName')}, priority class {pod.get('priorityClassName')}"
        for key, got in there.items():
            # The chart adds a security context to a container without one.
            plain = [{part: value for part, value in one.items() if part != "securityContext"} for one in got]
            last = plain[len(plain) - len(wanted[key]) :]
            others = [one for one in plain if one in MORE[key] and one not in wanted[key]]
            if last != wanted[key] or others:
                yield f"{name}.{key}: {wanted[key]} are wanted, there are {got}"


def long_names_stay_apart() -> Iterator[str]:
    """Compares the names of objects of two releases whose names differ in their last letter."""
    values = {"models": [{"name": "m" * 19 + end, "prefill": {"leaderWorkerSet": {"enabled": True}}} for end in "ab"]}
    names = []
    for release in ("r" * 52 + "a", "r" * 52 + "b"):
        objects = list(engine.objects(engine.render(values, "1.31", release)))
        names.append({(one["kind"], one["metadata"]["name"]) for one in objects})
        for flaw in invariants.names_and_labels(World(objects, {})):
            yield flaw
    if both := names[0] & names[1]:
        yield f"two releases have {sorted(both)}"


def models_of_images_are_mounted() -> Iterator[str]:
    """Compares volume, mount, folder and pull secrets of pools whose model lies in an image."""
    digest = f"r.example.com:5000/llm/chat@sha256:{'a' * 64}"
    cases = [
        ({"uri": "oci://r.example.com/llm/chat:v1", "path": "8b"}, "r.example.com/llm/chat:v1", "IfNotPresent", "/model/8b"),
        ({"uri": f"oci://{digest}", "oci": {"pullPolicy": "Never"}}, digest, "Never", "/model"),
        ({"source": "oci", "oci": {"reference": "chat:v2"}, "path": "/a/b"}, "chat:v2", "IfNotPresent", "/model/a/b"),
    ]
    for model, reference, policy, folder in cases:
        values = {"model": model, "imagePullSecrets": [{"name": "registry"}]}
        objects = list(engine.objects(engine.render(values, "1.34")))
        pools = [one for one in objects if one["kind"] == "Deployment" and not one["metadata"]["name"].endswith("router")]
        if len(pools) != 2:
            yield f"{model}: {len(pools)} pools"
        for pool in pools:
            pod = pool["spec"]["template"]["spec"]
            container = pod["containers"][0]
            got = {
                "volume": [one for one in pod["volumes"] if one["name"] == "model"],
                "mount": [one for one in container["volumeMounts"] if one["name"] == "model"],
                "flag": [arg for arg in container["args"] if arg.startswith("--model=")],
                "secrets": pod.get("imagePullSecrets"),
                "others": pod.get("initContainers"),
            }
            wanted = {
                "volume": [{"name": "model", "image": {"reference": reference, "pullPolicy": policy}}],
                "mount": [{"name": "model", "mountPath": "/model", "readOnly": True}],
                "flag": [f"--model={folder}"],
                "secrets": [{"name": "registry"}],
                "others": None,
            }
            if got != wanted:
                yield f"{model}: {got}, not {wanted}"
            yield from schemas.flaws(pool, "1.34")
        if claims := [one for one in objects if one["kind"] == "PersistentVolumeClaim"]:
            yield f"{model}: {len(claims)} claims"


def examples_of_pages_render() -> Iterator[str]:
    """Renders every YAML block of the guides and of the chart's README whose keys are the chart's."""
    known = set(yaml.load((engine.CHART / "values.yaml").read_text(), Loader=yaml.CSafeLoader))
    count = 0
    for page in (*sorted((engine.ROOT / "docs/guides").glob("*.md")), engine.CHART / "README.md"):
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            values = yaml.load(block, Loader=yaml.CSafeLoader)
            if not isinstance(values, dict) or not set(values) <= known:
                continue
            count += 1
            try:
                engine.render(values, "1.34")
            except engine.Refused as refused:
                yield f"{page.name}: {refused}"
    if count < 4:
        yield f"only {count} examples were found"


CASES = [
    threads_follow_resources,
    images_follow_values,
    additions_arrive,
    long_names_stay_apart,
    models_of_images_are_mounted,
    examples_of_pages_render,
]


def flaws() -> list[str]:
    return [f"{case.__name__}: {flaw}" for case in CASES for flaw in case()]
