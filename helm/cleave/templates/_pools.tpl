{{/* Pools of workers: their values, and what holds for some of them. */}}

{{/* The enabled pools as a JSON object with the key `pools`, in the order prefill, decode, both; for each of `models`
     if any are listed. They are made once for a rendering and kept among the values, since merging takes most of its
     time; then all values are checked, before any object is made of them. */}}
{{- define "cleave.pools" -}}
{{- $root := . -}}
{{- if not (hasKey .Values "resolvedPools") -}}
{{- $pools := list -}}
{{- range $model := default (list dict) .Values.models -}}
{{- range $role := list "prefill" "decode" "both" -}}
{{- $own := get $model $role | default dict -}}
{{- if ternary $own.enabled (get $root.Values $role).enabled (hasKey $own "enabled") -}}
{{- $pools = append $pools (fromJson (include "cleave.pool" (list $root $role $model))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $_ := set .Values "resolvedPools" (toJson (dict "pools" $pools)) -}}
{{- include "cleave.check" . -}}
{{- end -}}
{{- .Values.resolvedPools -}}
{{- end -}}

{{/* (root, role, entry of `models` or an empty map): the pool's values over those of `workers`, as JSON, with its
     `role`, its `name` (the role, or MODEL-ROLE), the `object` that is its workload, and the `servedName` of a listed
     model. */}}
{{- define "cleave.pool" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $of := index . 2 -}}
{{- $pool := fromJson (include "cleave.merge" (list $root.Values.workers (get $root.Values $role))) -}}
{{- $pool = fromJson (include "cleave.merge" (list $pool (default dict (get $of $role)))) -}}
{{- $model := fromJson (include "cleave.merge" (list $root.Values.model (default dict $of.model))) -}}
{{- $model = fromJson (include "cleave.merge" (list $model $pool.model)) -}}
{{- if $of -}}
{{- $_ := set $model "servedName" (default $of.name (default dict $of.model).servedName) -}}
{{- $_ := set $pool "servedName" $model.servedName -}}
{{- end -}}
{{- $name := ternary (printf "%s-%s" (toString $of.name) $role) $role (hasKey $of "name") -}}
{{- $_ := set $pool "model" (fromJson (include "cleave.modelSource" $model)) -}}
{{- $_ := set $pool "role" $role -}}
{{- $_ := set $pool "of" (default "" $of.name) -}}
{{- $_ := set $pool "name" $name -}}
{{- $_ := set $pool "object" (include "cleave.named" (list $root $name)) -}}
{{- toJson $pool -}}
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
{{- else if hasPrefix "oci://" $model.uri -}}
{{- $_ := set $model "source" "oci" -}}
{{- $_ := set $model.oci "reference" (trimPrefix "oci://" $model.uri) -}}
{{- end -}}
{{- toJson $model -}}
{{- end -}}

{{/* "true" if a pool has its model from the hub. */}}
{{- define "cleave.usesHub" -}}
{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" .)).pools -}}
{{- if eq .model.source "hub" -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* The claim that holds the models of the hub. */}}
{{- define "cleave.hubClaim" -}}
{{- default (include "cleave.named" (list . "models")) .Values.hub.cache.existingClaim -}}
{{- end -}}

{{/* The port of the hub. */}}
{{- define "cleave.hubPort" -}}
{{- $hub := urlParse .Values.hub.endpoint -}}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $hub.host) -}}
{{- default (ternary "443" "80" (eq $hub.scheme "https")) $port -}}
{{- end -}}

{{/* (root, type): "true" if a pool has this type of autoscaling. */}}
{{- define "cleave.scalesBy" -}}
{{- $type := index . 1 -}}{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" (index . 0))).pools -}}
{{- if eq .autoscaling.type $type -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* "true" if a pool may scale to zero workers. */}}
{{- define "cleave.scalesToZero" -}}
{{- $found := "" -}}
{{- range (fromJson (include "cleave.pools" .)).pools -}}
{{- if and (ne .autoscaling.type "none") (eq (int .autoscaling.minReplicas) 0) -}}{{- $found = "true" -}}{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{/* "true" if routers ask each other: for demand while there is no worker, and for stored responses. */}}
{{- define "cleave.asksFellows" -}}
{{- if or (eq (include "cleave.scalesToZero" .) "true") (gt (int .Values.router.replicas) 1) -}}true{{- end -}}
{{- end -}}

{{/* The object that an autoscaler of this pool scales. */}}
{{- define "cleave.scaleTarget" -}}
apiVersion: {{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" .leaderWorkerSet.enabled }}
kind: {{ ternary "LeaderWorkerSet" "Deployment" .leaderWorkerSet.enabled }}
name: {{ .object }}
{{- end -}}

{{/* A quantity of Kubernetes, such as 1500m or 8Gi, as a plain number. */}}
{{- define "cleave.number" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]+$" $text -}}
{{- $decimal := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $binary := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- mulf (trimSuffix $unit $text | float64) (get (merge $decimal $binary) $unit) -}}
{{- end -}}

{{/* A pool's threads on the processor: the value, or the whole cores of the CPU limit, or of the request without a
     limit; none on a GPU. A process has at least one. */}}
{{- define "cleave.threads" -}}
{{- $cores := default (default dict .resources.requests).cpu (default dict .resources.limits).cpu -}}
{{- if .threads -}}
{{- int .threads -}}
{{- else if and $cores (eq (toString .gpus) "0") -}}
{{- max 1 (include "cleave.number" $cores | float64 | floor | int) -}}
{{- end -}}
{{- end -}}
