"""A Python wheel that installs the binary as the command `cleave`, and has no Python code (PEP 427, PEP 491)."""

import base64
import hashlib

from archives import Entry, zipped

# A static binary runs with any C library, so one wheel has the tags of both. The other is linked with glibc 2.28.
PLATFORMS = {
    "x86_64-unknown-linux-musl": ["manylinux_2_17_x86_64", "musllinux_1_1_x86_64"],
    "aarch64-unknown-linux-musl": ["manylinux_2_17_aarch64", "musllinux_1_1_aarch64"],
    "x86_64-unknown-linux-gnu": ["manylinux_2_28_x86_64"],
}


def wheel(target: str, version: str, binary: bytes, readme: str, licence: bytes) -> tuple[str, bytes]:
    """The file's name and its bytes."""
    platforms = PLATFORMS[target]
    folder = f"cleave-{version}.dist-info"
    metadata = "\n".join(
        [
            "Metadata-Version: 2.4",
            "Name: cleave",
            f"Version: {version}",
            "Summary: Serves large language models with prefill and decode split apart",
            "License-Expression: Apache-2.0",
            "License-File: LICENSE",
            "Requires-Python: >=3.8",
            "Classifier: Environment :: GPU :: NVIDIA CUDA",
            "Classifier: Operating System :: POSIX :: Linux",
            "Classifier: Programming Language :: Rust",
            "Description-Content-Type: text/markdown",
            "",
            readme,
        ]
    )
    tags = "".join(f"Tag: py3-none-{platform}\n" for platform in platforms)
    files = [
        Entry(f"cleave-{version}.data/scripts/cleave", binary, 0o755),
        Entry(f"{folder}/METADATA", metadata.encode()),
        Entry(f"{folder}/WHEEL", f"Wheel-Version: 1.0\nGenerator: cleave\nRoot-Is-Purelib: false\n{tags}".encode()),
        Entry(f"{folder}/licenses/LICENSE", licence),
    ]
    record = "".join(f"{file.name},sha256={digest(file.data)},{len(file.data)}\n" for file in files)
    record += f"{folder}/RECORD,,\n"
    files.append(Entry(f"{folder}/RECORD", record.encode()))
    return f"cleave-{version}-py3-none-{'.'.join(platforms)}.whl", zipped(files)


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
