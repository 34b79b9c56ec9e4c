"""A bill of materials in CycloneDX 1.6: every crate that is compiled into the binary, with licence and checksum."""

import json
import re
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from archives import epoch


def bill(version: str, targets: list[str]) -> bytes:
    """The bill for a build of these targets."""
    wanted = set().union(*(compiled(target) for target in targets))
    metadata = json.loads(run(["cargo", "metadata", "--format-version", "1", "--locked"]))
    lock = tomllib.loads(Path("Cargo.lock").read_text())
    sums = {(crate["name"], crate["version"]): crate.get("checksum") for crate in lock["package"]}
    components = []
    for crate in metadata["packages"]:
        key = (crate["name"], crate["version"])
        if key not in wanted or crate["name"] == "cleave-cli":
            continue
        # Cargo took a slash for OR before licences became expressions of SPDX.
        licence = (crate["license"] or "").replace("/", " OR ")
        component = {
            "type": "library",
            "bom-ref": f"{key[0]}@{key[1]}",
            "name": key[0],
            "version": key[1],
            "licenses": [{"expression": re.sub(r"\s+", " ", licence)}] if licence else [],
        }
        if crate["source"]:
            component["purl"] = f"pkg:cargo/{key[0]}@{key[1]}"
        if sums.get(key):
            component["hashes"] = [{"alg": "SHA-256", "content": sums[key]}]
        components.append(component)
    components.sort(key=lambda component: component["bom-ref"])
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch(), tz=UTC).isoformat().replace("+00:00", "Z"),
            "component": {
                "type": "application",
                "bom-ref": f"cleave@{version}",
                "name": "cleave",
                "version": version,
                "licenses": [{"expression": "Apache-2.0"}],
            },
        },
        "components": components,
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def compiled(target: str) -> set[tuple[str, str]]:
    """Names and versions of the crates in the binary, without those that only run during the build."""
    tree = run(["cargo", "tree", "--locked", "-p", "cleave-cli", "--target", target, "-e", "normal,no-proc-macro"]
               + ["--prefix", "none", "--format", "{p}"])
    found = re.findall(r"^(\S+) v(\S+)", tree, re.MULTILINE)
    return set(found)


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
