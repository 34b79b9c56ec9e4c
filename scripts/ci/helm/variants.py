"""Values that the chart is rendered with, over those of each file, by their names."""

POOLS = ("prefill", "decode", "both")

# Additions of a user to pods, which collide with nothing of the chart.
MORE: dict = {
    "extraEnvFrom": [{"configMapRef": {"name": "proxy"}}],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "logs", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "logs", "mountPath": "/var/log/cleave"}],
    "extraContainers": [
        {
            "name": "shipper",
            "image": "shipper:1",
            "ports": [{"name": "ship", "containerPort": 9000}],
            "volumeMounts": [{"name": "logs", "mountPath": "/logs", "readOnly": True}],
        }
    ],
    "extraInitContainers": [{"name": "prepare", "image": "tools:1", "args": ["prepare"]}],
    "podLabels": {"team": "serving"},
    "schedulerName": "volcano",
    "priorityClassName": "serving",
}
ON_PROCESSOR: dict = {
    "gpus": "0",
    "resources": {"requests": {"cpu": "3500m", "memory": "8Gi"}, "limits": {"cpu": "4.9", "memory": "16Gi"}},
}

VARIANTS: dict[str, dict] = {
    "as it is": {},
    "mixed pool": {"both": {"enabled": True, "replicas": 2}},
    "mixed pool alone": {"both": {"enabled": True}, "prefill": {"enabled": False}, "decode": {"enabled": False}},
    "several models": {
        "models": [
            {
                "name": "chat",
                "aliases": ["gpt-4o"],
                "model": {"servedName": "org/Chat-8B"},
                "prefill": {"replicas": 3},
            },
            {
                "name": "sql",
                "model": {
                    "source": "pvc",
                    "pvc": {"claimName": "models"},
                    "path": "sql-8b",
                    "lora": {"modules": {"notes": "adapters/notes"}},
                },
                "decode": {"image": {"digest": f"sha256:{'d' * 64}"}, "extraEnv": [{"name": "A", "value": "1"}]},
            },
            {
                "name": "embed",
                "prefill": {"enabled": False},
                "decode": {"enabled": False},
                "both": {"enabled": True, "extraArgs": ["--runner=pooling"]},
            },
        ]
    },
    "adapters": {
        "model": {
            "source": "pvc",
            "pvc": {"claimName": "models"},
            "path": "base",
            "lora": {
                "modules": {"sql": "adapters/sql", "notes": "/adapters/notes"},
                "root": "adapters",
                "maxCpuLoras": 32,
                "maxRank": 16,
            },
        }
    },
    "hub": {
        "model": {"uri": "hf://org/Model-8B@v1", "lora": {"modules": {"sql": "hf://org/sql"}}},
        "hub": {"tokenSecret": {"name": "hub"}},
    },
    "hub of one's own": {
        "model": {"uri": "hf://org/Model-8B"},
        "hub": {"endpoint": "http://hub.mirrors:8080", "cache": {"existingClaim": "models"}},
    },
    "claim by address": {"model": {"uri": "pvc://models/llama/8b"}},
    "groups": {
        "workers": {"leaderWorkerSet": {"enabled": True, "size": 4, "exclusiveTopology": "topology.kubernetes.io/rack"}}
    },
    "gateway": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["llm.example.com"]}},
    "inference pool": {
        "inferencePool": {"enabled": True},
        "tls": {"secretName": ""},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    },
    "inference pool behind TLS": {
        "inferencePool": {"enabled": True, "pickerTls": "front"},
        "tls": {"secretName": "front"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    },
    "gateways that verify routers": {
        "inferencePool": {"enabled": True},
        "tls": {"secretName": "front"},
        "backendTLSPolicy": {"enabled": True, "hostname": "cleave.llm.svc", "caConfigMap": "authority"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    },
    "gateways with authorities of their own": {
        "tls": {"secretName": "front"},
        "backendTLSPolicy": {"enabled": True, "hostname": "llm.example.com"},
    },
    "inference pool whose picker speaks in clear": {
        "inferencePool": {"enabled": True, "pickerTls": "off"},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    },
    "TLS": {"tls": {"secretName": "front", "peerSecretName": "peers"}, "ingress": {"enabled": True}},
    "IPv6": {"network": {"ipFamily": "IPv6"}},
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")},
    "RDMA on the node's network": {
        "workers": {"hostNetwork": True, "gpus": "1", "rdma": {"resource": "vpc.amazonaws.com/efa", "count": "4"}},
    },
    "closed": {
        "networkPolicy": {
            "clients": [{"podSelector": {"matchLabels": {"app": "gateway"}}}],
            **{who: [{"podSelector": {}}] for who in ("autoscaler", "controlPlane")},
        },
        "telemetry": {"otlpEndpoint": "http://otel.observability:4317"},
        "router": {"adminKeySecret": {"name": "admin"}},
        "tests": {"apiKeySecret": {"name": "key"}},
    },
    "no objects but what serves": {
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"create": False},
        "policy": {"existingConfigMap": "ours"},
        "router": {"podDisruptionBudget": {"enabled": False}},
        "workers": {"podDisruptionBudget": {"enabled": False}},
    },
    "more in pods": {"commonLabels": {"team": "llm"}, "router": MORE, "workers": MORE, "decode": {"extraEnv": []}},
    "image by digest": {"image": {"repository": "registry:5000/cleave", "digest": f"sha256:{'a' * 64}"}},
    "offloading to claims of pods": {
        "workers": {
            **ON_PROCESSOR,
            "kvOffloading": {"size": "4Gi", "dir": {"source": "ephemeral", "storageClassName": "fast"}},
            "packedCache": {"source": "shared", "size": "30Gi"},
        },
    },
    "offloading to nodes": {
        "workers": {**ON_PROCESSOR, "kvOffloading": {"size": "1024Mi", "dirSize": "1Ti"}},
        "prefill": {
            "kvOffloading": {"dir": {"source": "hostPath", "hostPath": {"path": "/srv/kv"}}},
            "packedCache": {"source": "pvc", "pvc": {"claimName": "packed"}},
        },
        "decode": {"kvOffloading": {"dir": {"source": "emptyDir", "size": "2Ti"}}, "threads": 2},
        "both": {"kvOffloading": {"size": ""}},
    },
}
