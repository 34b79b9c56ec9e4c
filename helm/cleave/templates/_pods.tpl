{{/* Parts of pods, for routers and workers alike. */}}

{{/* (root, image of a pool or an empty map): the image by its digest, or else by its tag. A digest is of one image, so
     a pool that names its own repository or tag does not take the common one. */}}
{{- define "cleave.image" -}}
{{- $common := (index . 0).Values.image -}}{{- $own := index . 1 -}}
{{- $repository := default $common.repository $own.repository -}}
{{- $digest := $own.digest -}}
{{- if not (or $own.repository $own.tag $own.digest) -}}{{- $digest = $common.digest -}}{{- end -}}
{{- if $digest -}}
{{- printf "%s@%s" $repository $digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default (default (index . 0).Chart.AppVersion $common.tag) $own.tag) -}}
{{- end -}}
{{- end -}}

{{/* (root, port): the address on which a process listens. */}}
{{- define "cleave.listen" -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq (index . 0).Values.network.ipFamily "IPv6") -}}
{{- printf "%s:%d" $any (int (index . 1)) -}}
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

{{/* Containers of the user. One without a security context gets the chart's: a namespace with the restricted profile
     refuses others. */}}
{{- define "cleave.extraContainers" -}}
{{- $security := fromYaml (include "cleave.containerSecurity" "") -}}
{{- $containers := list -}}
{{- range . -}}
{{- $container := deepCopy . -}}
{{- if not (hasKey $container "securityContext") -}}{{- $_ := set $container "securityContext" $security -}}{{- end -}}
{{- $containers = append $containers $container -}}
{{- end -}}
{{- toYaml $containers -}}
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

{{/* (storage, name of a volume, name of the shared claim): the volume. */}}
{{- define "cleave.volume" -}}
{{- $storage := index . 0 -}}
- name: {{ index . 1 }}
{{- if eq $storage.source "emptyDir" }}
  emptyDir:
    sizeLimit: {{ $storage.size }}
{{- else if eq $storage.source "hostPath" }}
  hostPath:
    path: {{ $storage.hostPath.path }}
    type: Directory
{{- else if eq $storage.source "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec: {{- include "cleave.claim" (list $storage "ReadWriteOnce") | nindent 8 }}
{{- else }}
  persistentVolumeClaim:
    claimName: {{ ternary (index . 2) $storage.pvc.claimName (eq $storage.source "shared") }}
{{- end }}
{{- end -}}

{{/* (storage, access modes): the spec of a claim. */}}
{{- define "cleave.claim" -}}
{{- $storage := index . 0 -}}
accessModes: {{ if kindIs "slice" (index . 1) }}{{ toYaml (index . 1) | nindent 2 }}{{ else }}[{{ index . 1 }}]{{ end }}
{{- with $storage.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ $storage.size }}
{{- end -}}

{{/* (root, values of the router or of a pool, component, service account): the account of a pod, its rights, and where
     it may run. */}}
{{- define "cleave.podPlacement" -}}
{{- $root := index . 0 -}}{{- $own := index . 1 -}}
{{- $selector := include "cleave.selectorLabels" (list $root (index . 2)) -}}
serviceAccountName: {{ include "cleave.serviceAccount" (list $root (index . 3)) }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $own.schedulerName }}
schedulerName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.topologySpreadConstraints }}
topologySpreadConstraints: {{- include "cleave.spread" (list . $selector) | trim | nindent 2 }}
{{- end }}
{{- end -}}

{{/* (constraints, selector labels): spread of pods; constraints without a selector get the labels. */}}
{{- define "cleave.spread" -}}
{{- $labels := fromYaml (index . 1) -}}
{{- range index . 0 }}
- {{- toYaml (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) | nindent 2 }}
{{- end }}
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
