"""A Debian package: the binary, its manual pages and completions, and services for systemd."""

import hashlib

from archives import Entry, ar, compressed, tar

ARCHITECTURES = {
    "x86_64-unknown-linux-musl": "amd64",
    "aarch64-unknown-linux-musl": "arm64",
    "x86_64-unknown-linux-gnu": "amd64",
}

# Services are not enabled by an installation: which of them a machine runs is the administrator's choice.
RELOAD = "#!/bin/sh\nset -e\nif [ -d /run/systemd/system ]; then systemctl daemon-reload; fi\n"
STOP = """#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl stop cleave.service cleave-router.service 'cleave-worker@*.service' || true
fi
"""
# A service with a user of its own has its cache below `private`, and a link to it.
CLEAN = """if [ "$1" = purge ]; then
  rm -rf "${DPKG_ROOT:-}/var/cache/cleave" "${DPKG_ROOT:-}/var/cache/private/cleave"
fi
"""


def package(target: str, version: str, files: list[Entry], configuration: list[Entry]) -> tuple[str, bytes]:
    """The file's name and its bytes; `configuration` is kept when it was changed."""
    architecture = ARCHITECTURES[target]
    needs_glibc = target.endswith("-gnu")
    every = files + configuration
    kilobytes = sum(len(entry.data or b"") for entry in every) // 1024
    control = "\n".join(
        [
            "Package: cleave",
            f"Version: {version}",
            f"Architecture: {architecture}",
            "Maintainer: The Cleave maintainers <maintainers@cleave.invalid>",
            f"Installed-Size: {kilobytes}",
            *(["Depends: libc6 (>= 2.28)"] if needs_glibc else []),
            "Section: net",
            "Priority: optional",
            "Description: server of large language models with prefill and decode apart",
            " Prefill and decode workers in pools of their own, a router that assigns requests",
            " by their targets, and an HTTP API in the form of OpenAI's. One binary.",
            "",
        ]
    )
    sums = "".join(f"{hashlib.md5(entry.data).hexdigest()}  {entry.name}\n" for entry in every if entry.data is not None)
    members = [
        Entry("./control", control.encode()),
        Entry("./md5sums", sums.encode()),
        Entry("./conffiles", "".join(f"/{entry.name}\n" for entry in configuration).encode()),
        Entry("./postinst", RELOAD.encode(), 0o755),
        Entry("./prerm", STOP.encode(), 0o755),
        Entry("./postrm", (RELOAD + CLEAN).encode(), 0o755),
    ]
    data = tar([Entry(f"./{entry.name}", entry.data, entry.mode) for entry in every])
    archive = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", compressed(tar(members))),
        ("data.tar.gz", compressed(data)),
    ]
    return f"cleave_{version}_{architecture}.deb", ar(archive)
