{{/* Names of the chart and of its objects. */}}
{{- define "cleave.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "cleave.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "cleave.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "cleave.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The name by which workers and autoscalers find every router, ready or not. */}}
{{- define "cleave.routerAddress" -}}
{{- printf "%s-router.%s.svc:%d" (include "cleave.fullname" .) .Release.Namespace (int .Values.network.ports.http) -}}
{{- end -}}

{{/* Labels: (root, component). */}}
{{- define "cleave.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "cleave.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "cleave.labels" -}}
{{- $root := index . 0 -}}
{{ include "cleave.selectorLabels" . }}
app.kubernetes.io/part-of: cleave
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The pods of this release that have workers in them. */}}
{{- define "cleave.workerSelector" -}}
matchLabels:
  app.kubernetes.io/name: {{ include "cleave.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [{{ if .Values.models }}{{ join ", " (fromJson (include "cleave.pools" .)).pools }}{{ else }}prefill, decode, both{{ end }}]
{{- end -}}

{{/* Merges (map, map over it) and prints JSON. Maps are merged, all else is replaced; unlike sprig's merge, false, 0
     and "" replace too. */}}
{{- define "cleave.merge" -}}
{{- $merged := deepCopy (index . 0) -}}
{{- range $key, $value := index . 1 -}}
{{- $old := get $merged $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $old) -}}
{{- $_ := set $merged $key (fromJson (include "cleave.merge" (list $old $value))) -}}
{{- else if kindIs "invalid" $value -}}
{{- $_ := unset $merged $key -}}
{{- else -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end -}}

{{/* (root, pool's name): the pool's values over those of `workers`, as JSON, with its `role` and, where `models` are
     listed, the `servedName` of its model. The name of a pool of a listed model ends with the role. */}}
{{- define "cleave.pool" -}}
{{- $root := index . 0 -}}{{- $name := index . 1 -}}
{{- $role := regexFind "[^-]+$" $name -}}
{{- $of := dict -}}
{{- range $root.Values.models -}}{{- if eq (printf "%s-%s" .name $role) $name -}}{{- $of = . -}}{{- end -}}{{- end -}}
{{- $pool := fromJson (include "cleave.merge" (list $root.Values.workers (get $root.Values $role))) -}}
{{- $pool = fromJson (include "cleave.merge" (list $pool (default dict (get $of $role)))) -}}
{{- $model := fromJson (include "cleave.merge" (list $root.Values.model (default dict $of.model))) -}}
{{- $model = fromJson (include "cleave.merge" (list $model $pool.model)) -}}
{{- if $of -}}
{{- $_ := set $model "servedName" (default $of.name (default dict $of.model).servedName) -}}
{{- $_ := set $pool "servedName" $model.servedName -}}
{{- end -}}
{{- $_ := set $pool "model" (fromJson (include "cleave.modelSource" $model)) -}}
{{- $_ := set $pool "role" $role -}}
{{- toJson $pool -}}
{{- end -}}

{{/* A model whose `uri` became its source, as JSON. Of `hf://` the source is `hub`, with the model's name as `hubName`
     and all names to download, adapters' too, as `hubNames`. */}}
{{- define "cleave.modelSource" -}}
{{- $model := deepCopy . -}}
{{- if hasPrefix "hf://" $model.uri -}}
{{- $name := trimPrefix "hf://" $model.uri -}}
{{- $names := list $name -}}
{{- range $model.lora.modules -}}{{- $names = append $names (trimPrefix "hf://" .) -}}{{- end -}}
{{- $model = merge (dict "source" "hub" "path" "" "hubName" $name "hubNames" (uniq $names)) $model -}}
{{- else if hasPrefix "pvc://" $model.uri -}}
{{- $parts := splitn "/" 2 (trimPrefix "pvc://" $model.uri) -}}
{{- $pvc := dict "claimName" $parts._0 -}}
{{- $_ := set $model "source" "pvc" -}}
{{- $_ := set $model "pvc" $pvc -}}
{{- $_ := set $model "path" (default "" $parts._1) -}}
{{- end -}}
{{- toJson $model -}}
{{- end -}}

{{/* "true" if a pool has its model from the hub. */}}
{{- define "cleave.usesHub" -}}
{{- $root := . -}}{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" $root)).pools -}}
{{- $pool := fromJson (include "cleave.pool" (list $root .)) -}}
{{- if eq $pool.model.source "hub" -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* The claim that holds the models of the hub. */}}
{{- define "cleave.hubClaim" -}}
{{- default (printf "%s-models" (include "cleave.fullname" .)) .Values.hub.cache.existingClaim -}}
{{- end -}}

{{/* The port of the hub. */}}
{{- define "cleave.hubPort" -}}
{{- $hub := urlParse .Values.hub.endpoint -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $hub.host) -}}
{{- default (ternary "443" "80" (eq $hub.scheme "https")) $port -}}
{{- end -}}

{{/* (root, image of a pool or an empty map): the image with its tag. */}}
{{- define "cleave.image" -}}
{{- $root := index . 0 -}}{{- $own := index . 1 -}}
{{- $repository := default $root.Values.image.repository $own.repository -}}
{{- $tag := default (default $root.Chart.AppVersion $root.Values.image.tag) $own.tag -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}

{{/* (root, port): the address on which a process listens. */}}
{{- define "cleave.listen" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq (index . 0).Values.network.ipFamily "IPv6") -}}
{{- printf "%s:%d" $any (int (index . 1)) -}}
{{- end -}}

{{- define "cleave.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create -}}
{{- printf "%s-%s" (include "cleave.fullname" $root) (index . 1) -}}
{{- else -}}
{{- $root.Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The security context of a container, without any capability. The argument "IPC_LOCK" lets RDMA pin memory. */}}
{{- define "cleave.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
  {{- with . }}
  add: [{{ . }}]
  {{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Environment of every process. */}}
{{- define "cleave.env" -}}
- name: RUST_LOG
  value: {{ .Values.logLevel | quote }}
- name: XDG_CACHE_HOME
  value: /var/cache/cleave
{{- with .Values.telemetry.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* (constraints, selector labels): spread of pods; constraints without a selector get the labels. */}}
{{- define "cleave.spread" -}}
{{- $labels := fromYaml (index . 1) -}}
{{- range index . 0 }}
- {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Names of the enabled pools, as a JSON object with the key `pools`: the roles, or MODEL-ROLE for each of
     `models`. */}}
{{- define "cleave.pools" -}}
{{- $root := . -}}{{- $pools := list -}}
{{- range $model := default (list dict) .Values.models -}}
{{- range $role := list "prefill" "decode" "both" -}}
{{- $own := get $model $role | default dict -}}
{{- $enabled := ternary $own.enabled (get $root.Values $role).enabled (hasKey $own "enabled") -}}
{{- if $enabled -}}
{{- $pools = append $pools (ternary (printf "%s-%s" (toString $model.name) $role) $role (hasKey $model "name")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "pools" $pools) -}}
{{- end -}}

{{/* A served name as the value of a label, as the routers write it in their external metric. */}}
{{- define "cleave.labelValue" -}}
{{- regexReplaceAll "^[^A-Za-z0-9]+|[^A-Za-z0-9]+$" (regexReplaceAll "[^A-Za-z0-9._-]" . "-" | trunc 63) "" -}}
{{- end -}}

{{/* (root, type): "true" if a pool has this type of autoscaling. */}}
{{- define "cleave.scalesBy" -}}
{{- $root := index . 0 -}}{{- $type := index . 1 -}}{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" $root)).pools -}}
{{- if eq (fromJson (include "cleave.pool" (list $root .))).autoscaling.type $type -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* "true" if a pool may scale to zero workers. */}}
{{- define "cleave.scalesToZero" -}}
{{- $root := . -}}{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" $root)).pools -}}
{{- $scaling := (fromJson (include "cleave.pool" (list $root .))).autoscaling -}}
{{- if and (ne $scaling.type "none") (eq (int $scaling.minReplicas) 0) -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* "true" if routers ask each other: for demand while there is no worker, and for stored responses. */}}
{{- define "cleave.asksFellows" -}}
{{- if or (eq (include "cleave.scalesToZero" .) "true") (gt (int .Values.router.replicas) 1) -}}true{{- end -}}
{{- end -}}

{{/* (root, pool's name, pool): the object that an autoscaler scales. */}}
{{- define "cleave.scaleTarget" -}}
{{- $set := (index . 2).leaderWorkerSet.enabled -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" $set }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" $set }}
name: {{ include "cleave.fullname" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* The strategy by which a Deployment replaces pods. */}}
{{- define "cleave.strategy" -}}
{{- if eq .type "Recreate" -}}
type: Recreate
{{- else -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* OTLP's port, for egress rules; empty without an endpoint. */}}
{{- define "cleave.otlpPort" -}}
{{- with .Values.telemetry.otlpEndpoint -}}
{{- $port := regexFind ":[0-9]+$" (get (urlParse .) "host") -}}
{{- $port | trimPrefix ":" | default "4317" -}}
{{- end -}}
{{- end -}}
