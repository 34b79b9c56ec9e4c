"""Unpacks an archive in OCI layout into a folder, as a container engine would: by index, manifest and layers, and every
digest and size on the way is compared.

usage: unpack_image.py ARCHIVE MACHINE|- FOLDER      `-`: an artifact without a platform
"""

import gzip
import hashlib
import io
import json
import sys
import tarfile

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def main() -> None:
    path, machine, folder = sys.argv[1:4]
    with tarfile.open(path) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}

    def blob(descriptor: dict) -> bytes:
        kind, _, digest = descriptor["digest"].partition(":")
        data = files[f"blobs/{kind}/{digest}"]
        assert kind == "sha256" and hashlib.sha256(data).hexdigest() == digest, descriptor
        assert len(data) == descriptor["size"], descriptor
        return data

    assert json.loads(files["oci-layout"])["imageLayoutVersion"] == "1.0.0"
    index = json.loads(files["index.json"])
    (descriptor,) = index["manifests"]
    if machine != "-":
        platforms = json.loads(blob(descriptor))["manifests"]
        wanted = ARCHITECTURES[machine]
        (descriptor,) = [each for each in platforms if each["platform"]["architecture"] == wanted]
    manifest = json.loads(blob(descriptor))
    config = json.loads(blob(manifest["config"]))
    for number, layer in enumerate(manifest["layers"]):
        data = gzip.decompress(blob(layer))
        if machine != "-":
            assert config["rootfs"]["diff_ids"][number] == f"sha256:{hashlib.sha256(data).hexdigest()}"
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            archive.extractall(folder, numeric_owner=True, filter="fully_trusted")


if __name__ == "__main__":
    main()
