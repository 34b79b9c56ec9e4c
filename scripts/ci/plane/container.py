"""One container as a process: a root of its own, the pod's network, and the user and rights that the pod's spec has.

Owns: the root's mounts, the process, its end. Never: reads the API. A field of a pod that this
file does not implement is an error. Only resources, seccomp's profile and network policies are accepted without being
enforced; no pod of the chart notices.
"""

import dataclasses
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from network import DNS, DOMAIN


@dataclasses.dataclass
class Image:
    """An image: files of this machine by their path in the image, and the entry point."""

    entrypoint: list[str]
    files: dict[str, Path]


# Programs and libraries are those of this machine; a real image has its own.
ROOT = """
mount -t tmpfs -o mode=755 root {root}
cd {root}
mkdir usr proc dev etc tmp
for link in bin sbin lib lib64; do ln -s usr/$link $link; done
mount --bind /usr usr && mount -o remount,bind,ro usr
mount -t proc proc proc
for device in null zero random urandom; do touch dev/$device && mount --bind /dev/$device dev/$device; done
printf 'nameserver {dns}\\nsearch {namespace}.svc.{domain} svc.{domain} {domain}\\noptions ndots:5\\n' > etc/resolv.conf
printf '127.0.0.1 localhost\\n{address} {host}\\n' > etc/hosts
printf 'hosts: files dns\\n' > etc/nsswitch.conf
"""


class Around(NamedTuple):
    """Properties of the pod that its container needs."""

    volumes: dict[str, Path]
    address: str
    log: Path


class Container:
    """A container of a pod, from its spec; each start is a process of its own."""

    def __init__(self, pod: dict, spec: dict, image: Image, around: Around) -> None:
        self.pod, self.spec, self.image = pod, spec, image
        self.volumes, self.address, self.log = around
        self.restarts = -1
        self.child: subprocess.Popen | None = None
        unknown = set(spec) & {"lifecycle", "envFrom", "workingDir"}
        if unknown:
            raise AssertionError(f"a container asks for {unknown}, which is not known here")

    def start(self, namespace: str) -> None:
        self.restarts += 1
        self.started = time.monotonic()
        script = self._script(Path(f"/run/plane/{namespace}/root"))
        with open(self.log, "a") as log:
            self.child = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--mount", "--propagation=private", "sh", "-ec", script],
                stdout=log, stderr=log, env=self._environment(), start_new_session=True,
            )

    def code(self) -> int | None:
        return self.child.poll() if self.child else None

    def tell(self, number: signal.Signals) -> None:
        if self.child and self.child.poll() is None:
            self.child.send_signal(number)

    # === from the spec ===

    def _script(self, root: Path) -> str:
        """Returns the start script. Each step replaces the shell, so that signals reach the container's process
        itself."""
        meta = self.pod["metadata"]
        lines = [ROOT.format(root=root, dns=DNS, domain=DOMAIN, namespace=meta["namespace"], address=self.address, host=meta["name"])]
        for inside, outside in self.image.files.items():
            lines.append(f"{_bound(outside, inside)} && {_only_read(inside)}")
        for mount in self.spec.get("volumeMounts", []):
            lines.append(_bound(self.volumes[mount["name"]], mount["mountPath"]))
            if mount.get("readOnly"):
                lines.append(_only_read(mount["mountPath"]))
        security = self.pod["spec"].get("securityContext", {}) | self.spec.get("securityContext", {})
        if security.get("readOnlyRootFilesystem"):
            lines.append("mount -o remount,ro .")
        user, group = security.get("runAsUser", 0), security.get("runAsGroup", 0)
        if security.get("runAsNonRoot") and user == 0:
            raise AssertionError("root, where the pod says that nobody is")
        words = ["chroot", ".", "setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={security.get('fsGroup', group)}"]
        if security.get("allowPrivilegeEscalation") is False:
            words.append("--no-new-privs")
        if "ALL" in security.get("capabilities", {}).get("drop", []):
            words += ["--bounding-set=-all", "--inh-caps=-all"]
        command = self.spec.get("command", self.image.entrypoint) + self._arguments()
        return "\n".join([*lines, f"exec {shlex.join([*words, '--', *command])}"])

    def _environment(self) -> dict[str, str]:
        said = {"PATH": "/usr/bin:/bin:/usr/sbin", "HOSTNAME": self.pod["metadata"]["name"]}
        for one in self.spec.get("env", []):
            said[one["name"]] = self._value(one)
        return said

    def _value(self, one: dict) -> str:
        if "valueFrom" not in one:
            return one.get("value", "")
        field = one["valueFrom"]["fieldRef"]["fieldPath"]
        known = {"metadata.name": self.pod["metadata"]["name"], "status.podIP": self.address,
                 "metadata.namespace": self.pod["metadata"]["namespace"]}
        return known[field]

    def _arguments(self) -> list[str]:
        """Returns the arguments with $(NAME) replaced from the container's environment."""
        words = self.spec.get("args", [])
        for one in self.spec.get("env", []):
            words = [word.replace(f"$({one['name']})", self._value(one)) for word in words]
        return words


def _place(inside: str) -> str:
    return shlex.quote(inside.lstrip("/"))


def _bound(outside: Path, inside: str) -> str:
    place = _place(inside)
    made = f"mkdir -p {place}" if outside.is_dir() else f"mkdir -p $(dirname {place}) && touch {place}"
    return f"{made} && mount --bind {shlex.quote(str(outside))} {place}"


def _only_read(inside: str) -> str:
    return f"mount -o remount,bind,ro {_place(inside)}"


def tmpfs(folder: Path, limit: str) -> None:
    """Mounts memory of a size as Kubernetes writes it."""
    number = limit.rstrip("KMGi")
    factor = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[limit[len(number):]]
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(number) * factor}", "memory", folder], check=True)

