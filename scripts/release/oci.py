"""Images and charts as archives in the layout of the OCI image specification, made without a daemon or a registry.

`skopeo copy oci-archive:FILE docker://HOST/NAME:TAG`, `crane push` and `docker load` take them.
"""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime

from archives import Entry, compressed, epoch, tar

USER = 65532
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
# https://helm.sh/docs/topics/registries/: a chart's manifest.
CHART_CONFIG = "application/vnd.cncf.helm.config.v1+json"
CHART_LAYER = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
ARCHITECTURES = {"x86_64-unknown-linux-musl": "amd64", "aarch64-unknown-linux-musl": "arm64"}


@dataclass
class Layout:
    """Blobs by digest; an archive of them with an index."""

    blobs: dict[str, bytes]

    def add(self, media_type: str, data: bytes) -> dict:
        """Stores a blob and returns its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def add_json(self, media_type: str, value: dict) -> dict:
        return self.add(media_type, json.dumps(value, sort_keys=True, separators=(",", ":")).encode())

    def archive(self, manifests: list[dict]) -> bytes:
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
        entries = [Entry(f"blobs/sha256/{digest}", data) for digest, data in self.blobs.items()]
        entries.append(Entry("index.json", json.dumps(index, sort_keys=True).encode()))
        entries.append(Entry("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'))
        return tar(entries)


def image(binaries: dict[str, bytes], version: str, commit: str, licence: bytes) -> bytes:
    """One image for every architecture of the static binaries: the binary, a folder for its cache, and nothing else.
    Without a shell, and not as root."""
    layout = Layout({})
    labels = {
        "org.opencontainers.image.title": "cleave",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": commit,
        "org.opencontainers.image.licenses": "Apache-2.0",
    }
    manifests = []
    for target, binary in binaries.items():
        files = tar(
            [
                Entry("usr/local/bin/cleave", binary, 0o755),
                Entry("usr/share/doc/cleave/LICENSE", licence),
                Entry("var/cache/cleave", None, 0o755, USER),
                Entry("tmp", None, 0o1777),
            ]
        )
        config = {
            "created": datetime.fromtimestamp(epoch(), tz=UTC).isoformat().replace("+00:00", "Z"),
            "architecture": ARCHITECTURES[target],
            "os": "linux",
            "config": {
                "User": f"{USER}:{USER}",
                "Env": ["PATH=/usr/local/bin", "XDG_CACHE_HOME=/var/cache/cleave", "HF_HOME=/var/cache/cleave/huggingface"],
                "Entrypoint": ["/usr/local/bin/cleave"],
                "Cmd": ["serve", "--host", "0.0.0.0"],
                "ExposedPorts": {"8000/tcp": {}, "8001/tcp": {}, "7000/tcp": {}},
                "Labels": labels,
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(files).hexdigest()}"]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": layout.add_json(CONFIG, config),
            "layers": [layout.add(LAYER, compressed(files))],
            "annotations": labels,
        }
        platform = {"architecture": ARCHITECTURES[target], "os": "linux"}
        manifests.append({**layout.add_json(MANIFEST, manifest), "platform": platform})
    index = layout.add_json(INDEX, {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests})
    return layout.archive([{**index, "annotations": {"org.opencontainers.image.ref.name": version}}])


def chart(metadata: dict, archive: bytes) -> bytes:
    """A packaged chart as `helm push` stores it; `metadata` is Chart.yaml's content."""
    layout = Layout({})
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": layout.add_json(CHART_CONFIG, metadata),
        "layers": [layout.add(CHART_LAYER, archive)],
        "annotations": {
            "org.opencontainers.image.title": metadata["name"],
            "org.opencontainers.image.version": metadata["version"],
        },
    }
    descriptor = layout.add_json(MANIFEST, manifest)
    return layout.archive([{**descriptor, "annotations": {"org.opencontainers.image.ref.name": metadata["version"]}}])
