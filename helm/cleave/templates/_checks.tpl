{{/* Checks of values that a schema cannot express. Each message names the path. */}}
{{- define "cleave.check" -}}
{{- $root := . -}}
{{- include "cleave.checkModels" . -}}
{{- if and (include "cleave.scalesBy" (list . "keda")) (include "cleave.scalesBy" (list . "hpa")) -}}
{{- fail "autoscaling.type: pools scale by keda and by hpa, but a cluster has one external metrics API: choose one" -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled .clients (not .autoscaler) (include "cleave.scalesBy" (list $root "keda")) -}}
{{- fail "networkPolicy.autoscaler: clients are named, so KEDA's operator must be too: it asks the same port" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: name the gateway that the route belongs to" -}}
{{- end -}}
{{- with .Values.backendTLSPolicy -}}
{{- if and .enabled (not $root.Values.tls.secretName) -}}
{{- fail "backendTLSPolicy.enabled: routers speak HTTPS only with a certificate: set tls.secretName" -}}
{{- end -}}
{{- if and .enabled (not .hostname) -}}
{{- fail "backendTLSPolicy.hostname: gateways compare it with the certificate: set the certificate's name" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (eq .Values.inferencePool.pickerTls "front") (not .Values.tls.secretName) -}}
{{- fail "inferencePool.pickerTls: the front has no certificate to show: set tls.secretName, or leave it empty" -}}
{{- end -}}
{{- include "cleave.checkPorts" . -}}
{{- include "cleave.checkResources" (list "router" .Values.router.resources) -}}
{{- range $path, $labels := dict "commonLabels" .Values.commonLabels "router.podLabels" .Values.router.podLabels "serviceMonitor.labels" .Values.serviceMonitor.labels "prometheusRule.labels" .Values.prometheusRule.labels "dashboard.labels" .Values.dashboard.labels -}}
{{- include "cleave.checkLabels" (list $path $labels) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]" (include "cleave.fullname" .)) -}}
{{- fail (printf "fullnameOverride: a Service's name begins with a letter, but that of release %s does not: set one" .Release.Name) -}}
{{- end -}}
{{- range (fromJson (include "cleave.pools" .)).pools -}}
{{- include "cleave.checkPool" (list $root .name .) -}}
{{- include "cleave.checkStorage" . -}}
{{- end -}}
{{- $_ := include "cleave.sharedStorage" . -}}
{{- end -}}

{{/* Each model has workers for both legs, and a name that no other model answers to. */}}
{{- define "cleave.checkModels" -}}
{{- $roles := dict -}}
{{- range (fromJson (include "cleave.pools" .)).pools -}}
{{- $_ := set $roles .of (append (default list (get $roles .of)) .role) -}}
{{- end -}}
{{- $names := list -}}{{- $served := list -}}
{{- range .Values.models -}}
{{- if has .name $names -}}{{- fail (printf "models: two have the name %s" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- range prepend (default list .aliases) (default .name (default dict .model).servedName) -}}
{{- if has . $served -}}{{- fail (printf "models: two answer to the name %s, by servedName or aliases" .) -}}{{- end -}}
{{- $served = append $served . -}}
{{- end -}}
{{- if not (include "cleave.hasLegs" (get $roles .name)) -}}
{{- fail (printf "models: a request for %s needs both legs: enable prefill and decode, or both" .name) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.models) (not (include "cleave.hasLegs" (get $roles ""))) -}}
{{- fail "prefill.enabled, decode.enabled, both.enabled: a request needs both legs: enable prefill and decode, or both" -}}
{{- end -}}
{{- end -}}

{{/* "true" if pools of these roles serve a whole request. */}}
{{- define "cleave.hasLegs" -}}
{{- $roles := default list . -}}
{{- if or (has "both" $roles) (and (has "prefill" $roles) (has "decode" $roles)) -}}true{{- end -}}
{{- end -}}

{{- define "cleave.checkPorts" -}}
{{- $seen := dict -}}
{{- range $name, $port := .Values.network.ports -}}
{{- $port = toString $port -}}
{{- if hasKey $seen $port -}}
{{- fail (printf "network.ports.%s: %s is %s already: give each its own port" $name $port (get $seen $port)) -}}
{{- end -}}
{{- $_ := set $seen $port $name -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (eq (int .Values.service.port) (int .Values.network.ports.extProc)) -}}
{{- fail (printf "service.port: %d is the picker's port of the same Service, network.ports.extProc" (int .Values.service.port)) -}}
{{- end -}}
{{- end -}}

{{/* (path, labels of the user): selectors and other programs depend on the chart's own labels. */}}
{{- define "cleave.checkLabels" -}}
{{- $path := index . 0 -}}
{{- range $label, $_ := index . 1 -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|component|part-of|version|managed-by)|helm\\.sh/chart|llm-d\\.ai/role|cleave/scraped)$" $label -}}
{{- fail (printf "%s: the chart sets the label %s, and selectors depend on it: remove it" $path $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path, resources): no request is above its limit. */}}
{{- define "cleave.checkResources" -}}
{{- $path := index . 0 -}}{{- $limits := default dict (index . 1).limits -}}
{{- range $resource, $request := default dict (index . 1).requests -}}
{{- with get $limits $resource -}}
{{- if and $request (gt (include "cleave.number" (default "0" $request) | float64) (include "cleave.number" . | float64)) -}}
{{- fail (printf "%s.resources.requests.%s: %s is more than the limit, %s" $path $resource $request .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "cleave.checkPool" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $pool := index . 2 -}}
{{- $scaling := $pool.autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas: %d is more than maxReplicas, %d" $name (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq $scaling.type "hpa") (eq (int $scaling.minReplicas) 0) (semverCompare "<1.37.0-0" $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.autoscaling.minReplicas: an HPA goes to 0 from Kubernetes 1.37 on, this is %s: use 1, or type keda" $name $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if ne (empty $pool.rdma.resource) (empty $pool.rdma.count) -}}
{{- fail (printf "%s.rdma: give resource and count, or neither" $name) -}}
{{- end -}}
{{- $update := $pool.strategy.rollingUpdate -}}
{{- if and (eq (toString $update.maxSurge) "0") (eq (toString $update.maxUnavailable) "0") -}}
{{- fail (printf "%s.strategy.rollingUpdate: maxSurge and maxUnavailable are both 0, so nothing could ever be replaced" $name) -}}
{{- end -}}
{{- if gt (int $pool.gpus) 1 -}}
{{- fail (printf "%s.gpus: a worker uses one GPU, so %s would be idle: set \"1\", and replicas to the number of GPUs" $name (ternary "the other" (printf "%d" (sub (int $pool.gpus) 1)) (eq (int $pool.gpus) 2))) -}}
{{- end -}}
{{- include "cleave.checkLabels" (list (printf "%s.podLabels" $name) $pool.podLabels) -}}
{{- include "cleave.checkResources" (list $name $pool.resources) -}}
{{- with (default dict $pool.resources.limits).cpu -}}
{{- $cores := max 1 (include "cleave.number" . | float64 | floor | int) -}}
{{- if gt (int $pool.threads) $cores -}}
{{- fail (printf "%s.threads: %d threads share a CPU limit of %s: raise resources.limits.cpu, or use at most %d" $name (int $pool.threads) . $cores) -}}
{{- end -}}
{{- end -}}
{{- include "cleave.checkModel" (list $root $name $pool.model) -}}
{{- end -}}

{{/* (root, pool's name, model): where the model and its adapters lie. */}}
{{- define "cleave.checkModel" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}{{- $model := index . 2 -}}
{{- if and (eq $model.source "oci") (not $model.oci.reference) -}}
{{- fail (printf "model.oci.reference: pool %s has its model in an image, but in which?" $name) -}}
{{- end -}}
{{- if and (eq $model.source "oci") (semverCompare "<1.33.0-0" $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.oci: pool %s has its model in an image, which Kubernetes mounts from 1.33 on, this is %s: use pvc:// or hf:// in model.uri" $name $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) -}}
{{- fail (printf "model.pvc.claimName: pool %s has its model on a claim, but which?" $name) -}}
{{- end -}}
{{- if and (eq $model.source "hostPath") (not $model.hostPath.path) -}}
{{- fail (printf "model.hostPath.path: pool %s has its model in a folder of the node, but which?" $name) -}}
{{- end -}}
{{- if and (eq $model.source "init") (not $model.init.image) -}}
{{- fail (printf "model.init.image: pool %s has its model fetched by an init container, but of which image?" $name) -}}
{{- end -}}
{{- if and (eq $model.source "hub") $model.lora.root -}}
{{- fail (printf "model.lora.root: pool %s has its model from a hub, whose volume has no folders of adapters: leave it empty" $name) -}}
{{- end -}}
{{- range $adapter, $folder := $model.lora.modules -}}
{{- if ne (eq $model.source "hub") (hasPrefix "hf://" $folder) -}}
{{- fail (printf "model.lora.modules.%s: pool %s needs an address with hf:// where model.uri has one, and a folder where it has not" $adapter $name) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $model.source "demo") (or $model.lora.modules $model.lora.root) -}}
{{- fail (printf "model.lora: pool %s has adapters, whose folders lie in the model's volume, but the demo has none: set model.source" $name) -}}
{{- end -}}
{{- with int $model.lora.maxCpuLoras -}}
{{- if lt . (int $model.lora.maxLoras) -}}
{{- fail (printf "model.lora.maxCpuLoras: pool %s has fewer than the %d of model.lora.maxLoras, which count among them: raise it, or set 0" $name (int $model.lora.maxLoras)) -}}
{{- end -}}
{{- end -}}
{{- range $adapter, $_ := $model.lora.modules -}}
{{- if not (regexMatch "^[^=\\s]+$" $adapter) -}}
{{- fail (printf "model.lora.modules: %q is no name of an adapter: = and spaces may not be in it" $adapter) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A pool's storage: each source has what it needs, and host memory lies within the pod's. */}}
{{- define "cleave.checkStorage" -}}
{{- $name := .name -}}
{{- range $path, $storage := dict "kvOffloading.dir" .kvOffloading.dir "packedCache" .packedCache -}}
{{- if and (eq $storage.source "pvc") (not $storage.pvc.claimName) -}}
{{- fail (printf "%s.%s.pvc.claimName: the source is pvc: name the claim" $name $path) -}}
{{- end -}}
{{- if and (eq $storage.source "hostPath") (not $storage.hostPath.path) -}}
{{- fail (printf "%s.%s.hostPath.path: the source is hostPath: name the folder" $name $path) -}}
{{- end -}}
{{- end -}}
{{- if and (ne .packedCache.source "none") (ne (toString .gpus) "0") -}}
{{- fail (printf "%s.packedCache.source: packed weights are for the processor, but the pool has GPUs: use none" $name) -}}
{{- end -}}
{{- $offloading := .kvOffloading -}}
{{- if and (ne $offloading.dir.source "none") (not $offloading.size) -}}
{{- fail (printf "%s.kvOffloading.size: blocks reach the disk through host memory: set a size, such as 4Gi" $name) -}}
{{- end -}}
{{- if has $offloading.dir.source (list "emptyDir" "ephemeral" "shared") -}}
{{- if gt (include "cleave.number" $offloading.dirSize | float64) (include "cleave.number" $offloading.dir.size | float64) -}}
{{- fail (printf "%s.kvOffloading.dir.size: a volume of %s does not hold a worker's file of up to %s (dirSize)" $name $offloading.dir.size $offloading.dirSize) -}}
{{- end -}}
{{- end -}}
{{- if $offloading.size -}}
{{- range $kind, $resources := pick .resources "requests" "limits" -}}
{{- with (default dict $resources).memory -}}
{{- if ge (include "cleave.number" $offloading.size | float64) (include "cleave.number" . | float64) -}}
{{- fail (printf "%s.kvOffloading.size: %s of host memory do not fit resources.%s.memory, %s: raise that" $name $offloading.size $kind .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (path of the values, pod, values of the router or of the pool): what the user adds to a pod does not collide with
     what is there. */}}
{{- define "cleave.checkPod" -}}
{{- $path := index . 0 -}}{{- $own := index . 2 -}}
{{- $spec := (fromYaml (index . 1)).spec -}}
{{- $main := first $spec.containers -}}
{{- include "cleave.checkArguments" (list $path $main.args (default list $own.extraArgs)) -}}
{{- $parts := dict "extraEnv" (dict "variable" $main.env) "extraVolumes" (dict "volume" $spec.volumes) -}}
{{- $all := concat (default list $spec.initContainers) $spec.containers -}}
{{- $_ := set $parts "extraContainers, extraInitContainers" (dict "container" $all) -}}
{{- range $key, $part := $parts -}}
{{- range $what, $items := $part -}}
{{- $names := list -}}
{{- range $items -}}{{- $names = append $names .name -}}{{- end -}}
{{- include "cleave.checkOnce" (list $path $key $what $names) -}}
{{- end -}}
{{- end -}}
{{- $mounts := list -}}{{- $ports := list -}}
{{- range $main.volumeMounts -}}{{- $mounts = append $mounts .mountPath -}}{{- end -}}
{{- range $spec.containers -}}
{{- range .ports -}}{{- $ports = append $ports (printf "%d/%s" (int .containerPort) (default "TCP" .protocol)) -}}{{- end -}}
{{- end -}}
{{- include "cleave.checkOnce" (list $path "extraVolumeMounts" "path" $mounts) -}}
{{- include "cleave.checkOnce" (list $path "extraContainers" "port" $ports) -}}
{{- end -}}

{{/* (path, key, kind of thing, names): no name is there twice. */}}
{{- define "cleave.checkOnce" -}}
{{- $seen := dict -}}
{{- $path := index . 0 -}}{{- $key := index . 1 -}}{{- $what := index . 2 -}}
{{- range index . 3 -}}
{{- if hasKey $seen . -}}
{{- fail (printf "%s.%s: the %s %s is there twice: the chart has it, or the list repeats it" $path $key $what .) -}}
{{- end -}}
{{- $_ := set $seen . true -}}
{{- end -}}
{{- end -}}

{{/* (path, arguments, extra arguments at their end): no flag is repeated that a value sets. */}}
{{- define "cleave.checkArguments" -}}
{{- $path := index . 0 -}}{{- $extra := index . 2 -}}
{{- $values := fromJson (include "cleave.valueOfFlag" (first (index . 1))) -}}
{{- $found := list -}}
{{- range $extra -}}
{{- $flag := regexFind "^--[a-z0-9-]+" . | trimPrefix "--" -}}
{{- with get $values $flag -}}{{- $found = append $found (printf "--%s (%s)" $flag .) -}}{{- end -}}
{{- end -}}
{{- with $found -}}
{{- fail (printf "%s.extraArgs: flags that the chart sets, by the values in brackets: %s" $path (join ", " .)) -}}
{{- end -}}
{{- end -}}

{{/* Values of the chart by the flags that they set, of a command of `cleave`, as JSON. */}}
{{- define "cleave.valueOfFlag" -}}
{{- $of := dict "router" (dict
  "listen" "network.ports.http"
  "admin-listen" "network.ports.admin"
  "policy" "policy"
  "router-mode" "router.mode"
  "placement" "router.placement"
  "shutdown-delay" "router.shutdownDelaySeconds"
  "drain-timeout" "router.drainSeconds"
  "ssl-certfile" "tls.secretName"
  "ssl-keyfile" "tls.secretName"
  "peer-tls" "tls.peerSecretName"
  "ext-proc-listen" "inferencePool.enabled"
  "ext-proc-tls" "inferencePool.pickerTls"
  "picker-endpoints" "inferencePool.enabled"
  "picker-admin-port" "network.ports.admin"
  "external-metrics-listen" "autoscaling.type"
  "fellow-routers" "router.replicas"
) "worker" (dict
  "leg" "prefill, decode, both"
  "router" "network.ports.http"
  "name" "the pod's name"
  "device" "gpus"
  "model" "model"
  "served-model-name" "model.servedName"
  "lora-modules" "model.lora.modules"
  "lora-root" "model.lora.root"
  "max-loras" "model.lora.maxLoras"
  "max-cpu-loras" "model.lora.maxCpuLoras"
  "max-lora-rank" "model.lora.maxRank"
  "data-listen" "network.ports.data"
  "data-advertise" "network.ports.data"
  "metrics-listen" "network.ports.admin"
  "drain-timeout" "drainSeconds"
  "threads" "threads"
  "kv-offloading-size" "kvOffloading.size"
  "kv-offloading-dir" "kvOffloading.dir"
  "kv-offloading-dir-size" "kvOffloading.dirSize"
  "packed-cache" "packedCache"
  "peer-tls" "tls.peerSecretName"
) -}}
{{- toJson (get $of .) -}}
{{- end -}}
