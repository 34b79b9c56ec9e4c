"""etcd, kube-apiserver and kube-controller-manager as processes.

Owns: their start and their end. Never: changes an object; it reads some to see that the server answers.
"""

import json
import secrets
import subprocess
import time
from pathlib import Path

from api import Api, ApiError

# The namespace of the test is its own, so fixed ports are free.
API_PORT, ETCD_PORT, PEER_PORT = 6443, 2379, 2380
SERVICES = "10.96.0.0/16"
# The node's address towards pods, and the API server's.
NODE = "10.244.0.1"
# Disabled controllers: nodes do not fail here, there is no cloud, and no pod asks for a service account's token.
CONTROLLERS = "*,-nodeipam,-nodelifecycle,-ttl,-service,-route,-cloud-node-lifecycle,-serviceaccount-token"
LIMIT = 60


class Control:
    """A control plane whose data lies in `folder`."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        self.folder, self.processes = folder, []
        folder.mkdir()
        self.token = secrets.token_hex(16)
        self.api = Api(API_PORT, self.token)
        key = folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        tokens = folder / "tokens.csv"
        tokens.write_text(f'{self.token},admin,admin,"system:masters"\n')
        etcd = f"http://127.0.0.1:{ETCD_PORT}"
        self._start("etcd", binaries / "etcd", data_dir=folder / "etcd", listen_client_urls=etcd, advertise_client_urls=etcd,
                    listen_peer_urls=f"http://127.0.0.1:{PEER_PORT}", unsafe_no_fsync="true")
        self._start(
            "kube-apiserver", binaries / "kube-apiserver", etcd_servers=etcd, cert_dir=folder / "certificates",
            secure_port=API_PORT, bind_address="127.0.0.1", advertise_address=NODE, token_auth_file=tokens,
            authorization_mode="RBAC", service_account_issuer="https://k.local", service_account_signing_key_file=key,
            service_account_key_file=key, service_cluster_ip_range=SERVICES, runtime_config="api/all=true",
            # The controller of service accounts' tokens is off, and no pod of the chart has a token.
            disable_admission_plugins="ServiceAccount",
        )
        self._answers()
        config = {
            "apiVersion": "v1", "kind": "Config", "current-context": "plane",
            "clusters": [{"name": "plane", "cluster": {
                "server": f"https://127.0.0.1:{API_PORT}", "insecure-skip-tls-verify": True}}],
            "users": [{"name": "admin", "user": {"token": self.token}}],
            "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": "admin"}}],
        }
        self.kubeconfig = json.dumps(config)
        path = folder / "kubeconfig"
        path.write_text(self.kubeconfig)
        self._start(
            "kube-controller-manager", binaries / "kube-controller-manager", kubeconfig=path,
            service_account_private_key_file=key, controllers=CONTROLLERS, leader_elect="false",
            # The defaults of 15 s and 5 min are shortened for the test; an HPA's own value overrides the second.
            horizontal_pod_autoscaler_sync_period="2s", horizontal_pod_autoscaler_downscale_stabilization="5s",
        )

    def _start(self, name: str, program: Path, **flags: object) -> None:
        words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        with open(self.folder / f"{name}.log", "w") as log:
            child = subprocess.Popen([program, *words], stdout=log, stderr=log)
        self.processes.append((name, child))

    def _answers(self) -> None:
        begun = time.monotonic()
        while True:
            for name, child in self.processes:
                if child.poll() is not None:
                    raise AssertionError(f"{name} ended:\n{(self.folder / f'{name}.log').read_text()[-3000:]}")
            try:
                # The server makes the default namespace when it starts to work.
                if self.api.get("/readyz") and self.api.get("/api/v1/namespaces/default"):
                    return
            except (OSError, ApiError):
                pass
            if time.monotonic() - begun > LIMIT:
                raise AssertionError(f"no API server within {LIMIT} s; logs are in {self.folder}")
            time.sleep(0.1)

    def end(self) -> None:
        for _, child in reversed(self.processes):
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
