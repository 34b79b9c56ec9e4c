"""Makes the files of a release from built binaries.

usage: package.py OUT TARGET=BINARY ...      e.g. package.py target/release-files x86_64-unknown-linux-musl=…/cleave

Of each target (see build.sh) an archive and a Python wheel; of each architecture a Debian package, from the build with
GPUs where there is one. Of the static binaries one image for all architectures, as an OCI archive. Of the source the
chart, as a package and as an OCI archive; a bill of materials; SHA256SUMS. The same binaries give the same bytes. One
of the binaries must run here: it writes its manual pages and completions.
"""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import debian
import oci
import sbom
import wheel
import yaml
from archives import Entry, compressed, tar

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    binaries = {target: Path(path).read_bytes() for target, _, path in (word.partition("=") for word in sys.argv[2:])}
    runnable = next(Path(path).resolve() for target, _, path in (word.partition("=") for word in sys.argv[2:])
                    if target.startswith(platform.machine()))
    os.chdir(ROOT)
    out.mkdir(parents=True, exist_ok=True)
    version = tomllib.loads(Path("Cargo.toml").read_text())["workspace"]["package"]["version"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    licence = Path("LICENSE").read_bytes()
    readme = Path("README.md").read_text()
    documents = manual_and_completions(runnable)
    written: dict[str, bytes] = {}
    for target, binary in binaries.items():
        name = f"cleave-{version}-{target}"
        files = [Entry("bin/cleave", binary, 0o755), Entry("LICENSE", licence), Entry("README.md", readme.encode())]
        entries = [Entry(f"{name}/{entry.name}", entry.data, entry.mode) for entry in files + documents]
        written[f"{name}.tar.gz"] = compressed(tar(entries))
        name, data = wheel.wheel(target, version, binary, readme, licence)
        written[name] = data
    for target in debian_targets(list(binaries)):
        usr = [Entry(f"usr/{entry.name}", entry.data, entry.mode) for entry in documents]
        usr += [Entry("usr/bin/cleave", binaries[target], 0o755), Entry("usr/share/doc/cleave/copyright", licence)]
        usr += [Entry(f"usr/lib/systemd/system/{unit.name}", unit.read_bytes()) for unit in units("*.service")]
        settings = [Entry(f"etc/cleave/{file.name}", file.read_bytes()) for file in units("*.yaml")]
        name, data = debian.package(target, version, usr, settings)
        written[name] = data
    static = {target: binary for target, binary in binaries.items() if target in oci.ARCHITECTURES}
    if static:
        written[f"cleave-{version}-image.tar"] = oci.image(static, version, commit, licence)
    metadata = yaml.safe_load(Path("helm/cleave/Chart.yaml").read_text())
    chart = chart_archive()
    written[f"{metadata['name']}-chart-{metadata['version']}.tgz"] = chart
    written[f"{metadata['name']}-chart-{metadata['version']}-oci.tar"] = oci.chart(metadata, chart)
    written[f"cleave-{version}.cdx.json"] = sbom.bill(version, list(binaries))
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(written.items()))
    written["SHA256SUMS"] = sums.encode()
    for name, data in written.items():
        (out / name).write_bytes(data)
        print(f"{len(data):>12}  {name}")


def debian_targets(targets: list[str]) -> list[str]:
    """One target of each architecture, that with GPUs first."""
    chosen = {}
    for target in sorted(targets):
        chosen.setdefault(debian.ARCHITECTURES[target], target)
    return list(chosen.values())


def units(pattern: str) -> list[Path]:
    return sorted((ROOT / "scripts/release/systemd").glob(pattern))


def manual_and_completions(cleave: Path) -> list[Entry]:
    """Manual pages and completions, as the binary writes them, below `share`."""
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cleave, "man", "--out", folder], check=True)
        for page in sorted(Path(folder).iterdir()):
            entries.append(Entry(f"share/man/man1/{page.name}.gz", compressed(page.read_bytes())))
    for shell, path in [
        ("bash", "share/bash-completion/completions/cleave"),
        ("zsh", "share/zsh/vendor-completions/_cleave"),
        ("fish", "share/fish/vendor_completions.d/cleave.fish"),
    ]:
        script = subprocess.run([cleave, "completions", shell], capture_output=True, check=True).stdout
        entries.append(Entry(path, script))
    return entries


def chart_archive() -> bytes:
    """The chart as `helm package` writes it: its files below a folder of its name."""
    listed = subprocess.run(["git", "ls-files", "helm/cleave"], capture_output=True, text=True, check=True)
    paths = [Path(path) for path in listed.stdout.split()]
    return compressed(tar([Entry(str(path.relative_to("helm")), path.read_bytes()) for path in paths]))


if __name__ == "__main__":
    main()
