"""Renders the chart as users would, and checks every object with schemas, rules and the binary.

usage: $(install_tools.sh FOLDER) check.py --cleave BIN [--helm BIN]

Helm's own engine renders values files in the variants of variants.py, for four versions of Kubernetes and by each
type of autoscaling, so that each two of these meet. Then bad values must be refused with their path, and the rules
must notice objects that were broken on purpose. With --helm another Helm, such as one of version 3, must render the
same. Exits with 1 and a line for each flaw.
"""

import argparse
import copy
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import cases
import engine
import invariants
import metrics
import pod_rules
import schemas
import yaml
from bad import BAD
from broken import BROKEN
from rendered import World, needed, template
from variants import POOLS, VARIANTS

VERSIONS = ["1.29", "1.31", "1.34", "1.37"]
FILES = sorted((engine.ROOT / "helm/values").glob("*.yaml"))


def scaled(kind: str) -> dict:
    """Returns values that scale every pool by `kind`, or none."""
    return {pool: {"autoscaling": {"type": kind, "minReplicas": 1}} for pool in POOLS}


class Found:
    """The flaws found, each once, and counts of what was checked."""

    def __init__(self) -> None:
        self.flaws: dict[str, str] = {}
        kinds = (
            "renderings",
            "objects",
            "custom resources",
            "command lines",
            "policies",
            "bad values",
            "broken objects",
        )
        self.counts = dict.fromkeys(kinds, 0)

    def add(self, flaw: str, where: str) -> None:
        self.flaws.setdefault(flaw, where)


def flags(cleave: str) -> dict[str, set[str]]:
    """Returns the flags of each command, from its help."""
    found = {}
    for command in ("router", "worker", "bench run", "pull"):
        told = subprocess.run([cleave, *command.split(), "--help"], capture_output=True, text=True, check=True).stdout
        found[command] = set(re.findall(r"^ +(?:-\w, )?(--[a-z0-9-]+)", told, re.MULTILINE))
    return found


def combinations(every: bool) -> Iterator[tuple[Path | None, str, str | None, str]]:
    """Yields (values file, variant, scaling, Kubernetes): all of them, or so many that each two parts meet.

    Each file meets each variant, with the scaling and the Kubernetes that bring the most new pairs.
    """
    seen: set[tuple] = set()
    rest = list(itertools.product((None, "none", "keda", "hpa"), VERSIONS))
    for file, variant in itertools.product((None, *FILES), VARIANTS):
        if every:
            yield from ((file, variant, *pair) for pair in rest)
            continue
        scaling, version = max(rest, key=lambda pair: len(pairs(file, variant, *pair) - seen))
        seen |= pairs(file, variant, scaling, version)
        yield file, variant, scaling, version
    whole = itertools.product((None, *FILES), VARIANTS, (None, "none", "keda", "hpa"), VERSIONS)
    every_pair = set().union(*(pairs(*one) for one in whole))
    if not every and seen != every_pair:
        raise AssertionError(f"these never meet: {every_pair - seen}")


def pairs(*parts: object) -> set[tuple]:
    return set(itertools.combinations(enumerate(parts), 2))


def matrix(found: Found, known: dict[str, set[str]], cleave: str, every: bool) -> None:
    """Renders and checks the combinations."""
    seen: set[str] = set()
    given: dict[str, set[str]] = {}
    for file, variant, scaling, version in combinations(every):
        where = f"{file.stem if file else 'defaults'}, {variant}, scaling {scaling or 'its own'}, Kubernetes {version}"
        layers = [from_file(file), VARIANTS[variant], scaled(scaling) if scaling else {}]
        objects = rendering(found, engine.merged(*layers), version, where)
        for flaw in invariants.flaws(World(objects, known)):
            found.add(flaw, where)
        for document in objects:
            one_object(found, seen, (document, version, cleave), where)
            for command, flags in pod_rules.own_flags(document):
                given.setdefault(command, set()).update(flags)
    own_flags_are_refused(found, given)


@functools.cache
def from_file(file: Path | None) -> dict:
    return yaml.load(file.read_text(), Loader=yaml.CSafeLoader) if file else {}


def own_flags_are_refused(found: Found, given: dict[str, set[str]]) -> None:
    """Gives every flag that the chart was seen to set among `extraArgs`; the refusal must name each."""
    for command, path in (("router", "router"), ("worker", "workers")):
        flags = sorted(given.get(command, ())) + ["--log-format=json"]
        try:
            engine.render({path: {"extraArgs": flags}}, "1.31")
            found.add(f"{path}.extraArgs: taken, though the chart sets them: {flags}", "flags")
        except engine.Refused as refused:
            named = set(re.findall(r"--[a-z0-9-]+", str(refused)))
            if missing := set(flags[:-1]) - named:
                found.add(f"{path}.extraArgs: not refused: {sorted(missing)}", "flags")
            if "--log-format" in named:
                found.add(f"{path}.extraArgs: --log-format is refused, though no value sets it", "flags")


def rendering(found: Found, values: dict, version: str, where: str) -> list[dict]:
    try:
        rendered = engine.render(values, version)
    except engine.Refused as refused:
        found.add(str(refused), where)
        return []
    found.counts["renderings"] += 1
    notes = next(text for name, text in rendered.items() if name.endswith("NOTES.txt"))
    if "/v1" not in notes or "/ui" not in notes or "<no value>" in "".join(rendered.values()):
        found.add("notes without an address, or a value that is none", where)
    objects = list(engine.objects(rendered))
    told = re.search(r"get ((?:(?:secret|configmap|pvc)/\S+ ?)+)$", notes, re.MULTILINE)
    if set(told[1].split() if told else []) != needed(objects):
        found.add(f"notes say that {told and told[1]} are needed, pods refer to {sorted(needed(objects))}", where)
    return objects


def one_object(found: Found, seen: set[str], what: tuple[dict, str, str], where: str) -> None:
    """Checks an object against its schema, and with the binary, promtool and rules; each different object once."""
    document, version, cleave = what
    key = json.dumps([version, document], sort_keys=True)
    if key in seen:
        return
    seen.add(key)
    found.counts["objects"] += 1
    found.counts["custom resources"] += (document["apiVersion"], document["kind"]) in schemas.custom()
    for flaw in schemas.flaws(document, version):
        found.add(f"{document['kind']} {document['metadata']['name']}: {flaw}", where)
    if pod := template(document):
        args = taken_for_granted(pod["spec"]["containers"][0]["args"])
        if (words := " ".join(args)) not in seen:
            seen.add(words)
            found.counts["command lines"] += 1
            if flaw := usage_flaw(args, cleave):
                found.add(flaw, where)
    if document["kind"] == "ConfigMap" and "policy.yaml" in document["data"]:
        policy = document["data"]["policy.yaml"]
        if policy not in seen:
            seen.add(policy)
            found.counts["policies"] += 1
            for flaw in policy_flaws(policy, cleave):
                found.add(flaw, where)
    if document["kind"] == "PrometheusRule" and (said := metrics.promtool(document)):
        found.add(said, where)


def taken_for_granted(args: list[str]) -> list[str]:
    """Returns a command line as a container's process gets it."""
    here = {"$(POD_NAME)": "prod-cleave-0", "[$(POD_IP)]": "[::1]", "$(POD_IP)": "127.0.0.1"}
    kept = []
    for arg in args:
        for variable, value in here.items():
            arg = arg.replace(variable, value)
        kept.append(arg)
    # The last --model wins, and a missing folder ends the process before it does anything.
    return [*kept, "--model=/nowhere"] if args[0] == "worker" and "--model=" not in " ".join(args) else kept


def usage_flaw(args: list[str], cleave: str) -> str | None:
    """Returns the binary's complaint about its arguments; a missing policy, model or server does not count."""
    # No argument may lead to a download.
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([cleave, *args], capture_output=True, text=True, check=False, timeout=60, env=offline)
    return f"cleave {' '.join(args)}: {done.stderr.strip()}" if done.returncode == 2 else None


def policy_flaws(policy: str, cleave: str) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(policy)
        file.flush()
        done = subprocess.run([cleave, "check", file.name], capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [f"policy: {done.stderr.strip() or done.stdout.strip()}"]


def bad_values(found: Found) -> None:
    for values, version, path in BAD:
        found.counts["bad values"] += 1
        try:
            engine.render(values, version)
            found.add(f"taken, though {path} is bad: {values}", "bad values")
        except engine.Refused as refused:
            # The path in a schema's message has slashes, that in the chart's own messages has dots.
            if path not in str(refused) and path not in str(refused).replace("/", "."):
                found.add(f"refused without its path {path}: {refused}", "bad values")


def broken_objects(found: Found, known: dict[str, set[str]]) -> None:
    """Breaks objects for each rule, which must notice."""
    rendered: dict[str, list[dict]] = {}
    cluster = from_file(engine.ROOT / "helm/values/cluster.yaml")
    for rule, layer, breaks in BROKEN:
        found.counts["broken objects"] += 1
        objects = rendered.get(str(layer)) or list(engine.objects(engine.render(engine.merged(cluster, layer), "1.31")))
        rendered[str(layer)] = objects
        broken = copy.deepcopy(objects)
        breaks(broken)
        if broken == objects:
            found.add(f"{rule}: the breaking does nothing", "broken objects")
        noticed = invariants.flaws(World(broken, known))
        noticed += [f"schema: {flaw}" for document in broken for flaw in schemas.flaws(document, "1.31")]
        if not any(flaw.startswith(f"{rule}:") for flaw in noticed):
            found.add(f"{rule} did not notice; noticed was {noticed}", "broken objects")


def second_opinion(found: Found, helm: str) -> None:
    """Renders with another Helm, which must give the same objects and refuse too old a Kubernetes."""
    found.counts["second opinions"] = 0
    release = [helm, "template", engine.RELEASE["name"], str(engine.CHART), "--namespace", engine.RELEASE["namespace"]]
    for file in FILES:
        for variant, layer in VARIANTS.items():
            found.counts["second opinions"] += 1
            values = engine.merged(from_file(file), layer)
            command = [*release, "--values", "-", "--kube-version", "1.31.0"]
            done = subprocess.run(command, input=yaml.safe_dump(values), capture_output=True, text=True, check=False)
            theirs = [one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one]
            ours = list(engine.objects(engine.render(values, "1.31")))
            as_text = [sorted(json.dumps(one, sort_keys=True) for one in objects) for objects in (ours, theirs)]
            if done.returncode != 0 or as_text[0] != as_text[1]:
                found.add(f"{helm} renders otherwise: {done.stderr.strip()}", f"{file.stem}, {variant}")
    old = subprocess.run([*release, "--kube-version", "1.28.0"], capture_output=True, text=True, check=False)
    if old.returncode == 0:
        found.add(f"{helm} installs on Kubernetes 1.28", "Chart.yaml")


def values_and_schema(found: Found) -> None:
    """Compares values.yaml with the schema: each value must be in both."""
    values = yaml.safe_load((engine.CHART / "values.yaml").read_text())
    schema = json.loads((engine.CHART / "values.schema.json").read_text())

    def walk(value: dict, node: dict, path: str) -> None:
        while "$ref" in node:
            node = functools.reduce(dict.__getitem__, node["$ref"].split("/")[1:], schema)
        properties = node.get("properties")
        if properties is None:
            return
        if node.get("additionalProperties") is not False:
            found.add(f"{path or 'values'}: unknown keys are taken", "values.schema.json")
        # Pools have only the values that differ from `workers`; resources may be empty.
        partly = path.split(".")[0] in POOLS or path in ("workers.model", "model.init.resources", "hub.resources")
        for key in sorted(set(value) ^ set(properties) - {"global"}):
            inside = key in value
            if inside or not partly:
                found.add(f"{path}.{key}: in {'values' if inside else 'the schema'} alone", "values.schema.json")
        for key, part in value.items():
            if isinstance(part, dict) and key in properties:
                walk(part, properties[key], f"{path}.{key}".lstrip("."))

    walk(values, schema, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cleave", required=True, help="the binary whose flags count")
    parser.add_argument("--every", action="store_true", help="render every combination for every Kubernetes")
    parser.add_argument("--helm", help="another Helm, which is to render the same")
    arguments = parser.parse_args()
    cleave = str(Path(arguments.cleave).resolve())
    found, known = Found(), flags(cleave)
    for version in VERSIONS:
        for message in engine.lint(version):
            found.add(f"lint: {message}", version)
    steps: list[Callable[[], object]] = [
        lambda: matrix(found, known, cleave, arguments.every),
        lambda: bad_values(found),
        lambda: broken_objects(found, known),
        lambda: values_and_schema(found),
        lambda: second_opinion(found, arguments.helm) if arguments.helm else None,
    ]
    for step in steps:
        step()
    for flaw in cases.flaws():
        found.add(flaw, "cases")
    has_promtool = bool(shutil.which("promtool"))
    for flaw in metrics.flaws() + (metrics.unraised() if has_promtool else []):
        found.add(flaw, "helm/cleave/files")
    for flaw, where in found.flaws.items():
        print(f"FLAW ({where}): {flaw}")
    counts = ", ".join(f"{count} {what}" for what, count in found.counts.items())
    print(f"{len(found.flaws)} flaws in {counts}, {len(invariants.RULES)} rules")
    print(
        f"{len(metrics.panels())} expressions of the dashboard, {len(metrics.rules())} of rules"
    )
    if not has_promtool:
        print("SKIPPED: no rule was checked, no alert raised: there is no promtool (Debian's package prometheus)")
    return 1 if found.flaws else 0


if __name__ == "__main__":
    sys.exit(main())
