{{/* Names of objects, and their labels. */}}

{{/* (text, longest length): the text as a name. A text that is longer, or has dots, which a Service's name may not
     have, gets a hash of the whole, so that two long names with one beginning stay apart. */}}
{{- define "cleave.fit" -}}
{{- $text := index . 0 -}}{{- $longest := int (index . 1) -}}
{{- if or (gt (len $text) $longest) (contains "." $text) -}}
{{- $kept := $text | replace "." "-" | trunc (int (sub $longest 9)) | trimSuffix "-" -}}
{{- printf "%s-%s" $kept (sha256sum $text | trunc 8) -}}
{{- else -}}
{{- $text -}}
{{- end -}}
{{- end -}}

{{- define "cleave.name" -}}
{{- include "cleave.fit" (list (default .Chart.Name .Values.nameOverride) 40) -}}
{{- end -}}

{{- define "cleave.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- include "cleave.fit" (list (default $full .Values.fullnameOverride) 40) -}}
{{- end -}}

{{/* (root, part): the name of an object of a part, such as a pool. With 52 letters there is room for what controllers
     append: hashes of revisions, and the suffix of a group's Service. */}}
{{- define "cleave.named" -}}
{{- include "cleave.fit" (list (printf "%s-%s" (include "cleave.fullname" (index . 0)) (index . 1)) 52) -}}
{{- end -}}

{{/* The name by which workers and autoscalers find every router, ready or not. */}}
{{- define "cleave.routerAddress" -}}
{{- printf "%s.%s.svc:%d" (include "cleave.named" (list . "router")) .Release.Namespace (int .Values.network.ports.http) -}}
{{- end -}}

{{/* Labels: (root, component). */}}
{{- define "cleave.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "cleave.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* (root, component), and labels of the user over `commonLabels`. Neither may replace one of the chart's: selectors
     depend on them (cleave.checkLabels). */}}
{{- define "cleave.labels" -}}
{{- $root := index . 0 -}}
{{- $more := $root.Values.commonLabels -}}
{{- if gt (len .) 2 -}}{{- $more = merge (deepCopy (index . 2)) $more -}}{{- end -}}
{{ include "cleave.selectorLabels" . }}
app.kubernetes.io/part-of: cleave
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- with $more }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The pods of this release that have workers in them. */}}
{{- define "cleave.workerSelector" -}}
{{- $names := list -}}
{{- range (fromJson (include "cleave.pools" .)).pools -}}{{- $names = append $names .name -}}{{- end -}}
matchLabels:
  app.kubernetes.io/name: {{ include "cleave.name" . }}
  app.kubernetes.io/instance: {{ .Release.Name }}
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [{{ if .Values.models }}{{ join ", " $names }}{{ else }}prefill, decode, both{{ end }}]
{{- end -}}

{{- define "cleave.serviceAccount" -}}
{{- $root := index . 0 -}}
{{- if $root.Values.serviceAccount.create -}}
{{- include "cleave.named" . -}}
{{- else -}}
{{- $root.Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* A served name as the value of a label, as the routers write it in their external metric. */}}
{{- define "cleave.labelValue" -}}
{{- regexReplaceAll "^[^A-Za-z0-9]+|[^A-Za-z0-9]+$" (regexReplaceAll "[^A-Za-z0-9._-]" . "-" | trunc 63) "" -}}
{{- end -}}
