"""The work of kube-proxy and the cluster's DNS: Services have addresses and names.

Owns: the node's links, routes and rules, within the network namespace of the test. Never: chooses endpoints by itself:
an address leads to those that Kubernetes' own controller lists, drawn anew for each connection.
"""

import random
import socket
import struct
import subprocess
import threading
from pathlib import Path

from api import Api, Cache
from control import NODE, SERVICES

DNS = "10.96.255.53"
DOMAIN = "cluster.local"
TABLE = "plane"


def links(*lines: str, namespace: str | None = None) -> None:
    """Runs commands of `ip` in one batch."""
    command = ["ip", *(("-n", namespace) if namespace else ()), "-batch", "-"]
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    if done.returncode != 0:
        raise AssertionError(f"{lines}: {done.stderr}")


def node() -> None:
    """Makes one link with the node's address and the routes of all Services."""
    links("link set lo up", "link add node0 type veth peer name node1", "link set node0 up", "link set node1 up", f"addr add {NODE}/32 dev node0",
          f"addr add {DNS}/32 dev node0", f"route add {SERVICES} dev node0 src {NODE}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def join(namespace: str, link: str, address: str) -> None:
    """Makes a network namespace with an address, which reaches others only through the node."""
    links(f"netns add {namespace}", f"link add {link} type veth peer name eth0 netns {namespace}", f"link set {link} up",
          f"route add {address}/32 dev {link} src {NODE}")
    links("link set lo up", f"addr add {address}/32 dev eth0", "link set eth0 up", f"route add {NODE}/32 dev eth0",
          f"route add default via {NODE} dev eth0", namespace=namespace)


def part(namespace: str) -> None:
    """Removes a network namespace; its links end with it."""
    links(f"netns del {namespace}")


class Services:
    """Addresses of Services, as rules of the kernel, and names, as a DNS server."""

    def __init__(self, api: Api) -> None:
        self.stirred = threading.Event()
        # The reason that addresses no longer lead anywhere.
        self.fault: str | None = None
        self.services = Cache(api, "/api/v1/services", self.stirred.set)
        self.endpoints = Cache(api, "/api/v1/endpoints", self.stirred.set)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((DNS, 53))
        for work in (self._follow, self._names):
            threading.Thread(target=work, daemon=True).start()

    # === addresses ===

    def _follow(self) -> None:
        known = ""
        while True:
            self.stirred.wait()
            self.stirred.clear()
            rules = self._rules()
            if rules != known:
                done = subprocess.run(["nft", "-f", "-"], input=rules, text=True, capture_output=True)
                if done.returncode != 0:
                    self.fault = f"nft did not take the Services' rules: {done.stderr.strip()}"
                    return
                known = rules

    def _rules(self) -> str:
        """Returns all rules, which replace the present ones at once; open connections stay with their pod."""
        found = []
        for service in self.services.all():
            address = service["spec"].get("clusterIP", "None")
            if address in ("None", "") or service["metadata"]["name"] == "kubernetes":
                continue
            for port in service["spec"]["ports"]:
                backs = self._backs(service, port.get("name", ""))
                match = f"ip daddr {address} tcp dport {port['port']}"
                if not backs:
                    continue
                choices = ", ".join(f"{number} : {ip} . {to}" for number, (ip, to) in enumerate(backs))
                found.append(f"{match} dnat to numgen random mod {len(backs)} map {{ {choices} }}")
        body = "\n    ".join(sorted(found))
        return f"""table ip {TABLE}
delete table ip {TABLE}
table ip {TABLE} {{
  chain services {{
    {body}
  }}
  chain sent {{ type nat hook output priority -100; jump services; }}
  chain passing {{ type nat hook prerouting priority -100; jump services; }}
  chain nobody {{ type filter hook output priority 0; ip daddr {SERVICES} ip daddr != {DNS} reject with icmp port-unreachable; }}
  chain nowhere {{ type filter hook forward priority 0; ip daddr {SERVICES} reject with icmp port-unreachable; }}
}}
"""

    def _backs(self, service: dict, port: str) -> list[tuple[str, int]]:
        meta = service["metadata"]
        found = self.endpoints.find(meta["namespace"], meta["name"]) or {}
        backs = []
        for subset in found.get("subsets") or []:
            numbers = [one["port"] for one in subset.get("ports", []) if one.get("name", "") == port]
            backs += [(one["ip"], number) for one in subset.get("addresses", []) for number in numbers]
        return sorted(backs)

    # === names ===

    def _names(self) -> None:
        while True:
            question, client = self.socket.recvfrom(512)
            try:
                self.socket.sendto(self._answer(question), client)
            except (IndexError, struct.error, UnicodeDecodeError):
                continue

    def _answer(self, question: bytes) -> bytes:
        """Answers questions for A records; known names have no other records."""
        labels, at = [], 12
        while length := question[at]:
            labels.append(question[at + 1:at + 1 + length].decode())
            at += 1 + length
        (kind,) = struct.unpack_from(">H", question, at + 1)
        addresses = self._addresses(".".join(labels).lower())
        records = addresses if kind == 1 and addresses else []
        # The answer is authoritative; NXDOMAIN means that the name does not exist.
        flags = 0x8580 | (3 if addresses is None else 0)
        head = question[:2] + struct.pack(">HHHHH", flags, 1, len(records), 0, 0)
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 1, 4)
        random.shuffle(records)
        return head + question[12:at + 5] + b"".join(record + socket.inet_aton(one) for one in records)

    def _addresses(self, name: str) -> list[str] | None:
        parts = name.removesuffix(f".{DOMAIN}").split(".")
        if not name.endswith(f".svc.{DOMAIN}") or len(parts) != 3:
            return None
        service = self.services.find(parts[1], parts[0])
        if service is None:
            return None
        address = service["spec"].get("clusterIP")
        if address != "None":
            return [address]
        found = self.endpoints.find(parts[1], parts[0]) or {}
        return [one["ip"] for subset in found.get("subsets") or [] for one in subset.get("addresses", [])]
