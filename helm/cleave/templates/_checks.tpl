{{/* Checks of values that a schema cannot express. Each message names the path. */}}
{{- define "cleave.check" -}}
{{- $root := . -}}
{{- $pools := (fromJson (include "cleave.pools" .)).pools -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- if has .name $names -}}{{- fail (printf "models: two have the name %s" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- $split := and (has (printf "%s-prefill" .name) $pools) (has (printf "%s-decode" .name) $pools) -}}
{{- if not (or $split (has (printf "%s-both" .name) $pools)) -}}
{{- fail (printf "models: a request for %s needs both legs: enable prefill and decode, or both" .name) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.models) (not (or (and .Values.prefill.enabled .Values.decode.enabled) .Values.both.enabled)) -}}
{{- fail "prefill.enabled, decode.enabled, both.enabled: a request needs both legs: enable prefill and decode, or both" -}}
{{- end -}}
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
{{- if and .Values.inferencePool.enabled (eq .Values.inferencePool.pickerTls "front") (not .Values.tls.secretName) -}}
{{- fail "inferencePool.pickerTls: the front has no certificate to show: set tls.secretName, or leave it empty" -}}
{{- end -}}
{{- range $name := (fromJson (include "cleave.pools" .)).pools -}}
{{- include "cleave.checkPool" (list $root $name (fromJson (include "cleave.pool" (list $root $name)))) -}}
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
{{- $model := $pool.model -}}
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
{{- range $adapter, $_ := $model.lora.modules -}}
{{- if not (regexMatch "^[^=\\s]+$" $adapter) -}}
{{- fail (printf "model.lora.modules: %q is no name of an adapter: = and spaces may not be in it" $adapter) -}}
{{- end -}}
{{- end -}}
{{- end -}}
