{{/* (root, pool): metadata and spec of a worker's pod. */}}
{{- define "cleave.workerPod" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- $ports := $root.Values.network.ports -}}
{{- $model := $pool.model -}}
{{- $storages := fromJson (include "cleave.storages" $pool) -}}
metadata:
  labels:
    {{- include "cleave.labels" (list $root $pool.name $pool.podLabels) | nindent 4 }}
    llm-d.ai/role: {{ $pool.role }}
  {{- with $pool.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- include "cleave.podPlacement" (list $root $pool $pool.name "worker") | nindent 2 }}
  # SIGTERM begins a drain: sequences move to workers of the same fingerprint while they generate, or end here.
  terminationGracePeriodSeconds: {{ add (int $pool.drainSeconds) 15 }}
  {{- if $pool.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if or $pool.extraInitContainers (has $model.source (list "init" "hub")) }}
  initContainers:
    {{- with $pool.extraInitContainers }}
    {{- include "cleave.extraContainers" . | nindent 4 }}
    {{- end }}
    {{- if eq $model.source "init" }}
    {{- include "cleave.fetchByImage" (list $root $model) | nindent 4 }}
    {{- else if eq $model.source "hub" }}
    {{- include "cleave.fetchFromHub" (list $root $pool) | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: worker
      image: {{ include "cleave.image" (list $root $pool.image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - worker
        - --leg={{ $pool.role }}
        - --router={{ include "cleave.routerAddress" $root }}
        - --name=$(POD_NAME)
        - --device={{ ternary "cpu" "cuda" (eq (toString $pool.gpus) "0") }}
        {{- if eq $model.source "hub" }}
        - {{ printf "--model=%s" $model.hubName | quote }}
        {{- else if ne $model.source "demo" }}
        - --model=/model{{ with $model.path }}/{{ trimPrefix "/" . }}{{ end }}
        {{- end }}
        {{- with $model.servedName }}
        - --served-model-name={{ . }}
        {{- end }}
        {{- if or $model.lora.modules $model.lora.root }}
        {{- range $adapter, $folder := $model.lora.modules }}
        {{- if eq $model.source "hub" }}
        - {{ printf "--lora-modules=%s=%s" $adapter (trimPrefix "hf://" $folder) | quote }}
        {{- else }}
        - {{ printf "--lora-modules=%s=/model/%s" $adapter (trimPrefix "/" $folder) | quote }}
        {{- end }}
        {{- end }}
        {{- with $model.lora.root }}
        - {{ printf "--lora-root=/model/%s" (trimPrefix "/" .) | quote }}
        {{- end }}
        - --max-loras={{ int $model.lora.maxLoras }}
        {{- with int $model.lora.maxCpuLoras }}
        - --max-cpu-loras={{ . }}
        {{- end }}
        - --max-lora-rank={{ int $model.lora.maxRank }}
        {{- end }}
        - --data-listen={{ include "cleave.listen" (list $root $ports.data) }}
        - --data-advertise={{ ternary "[$(POD_IP)]" "$(POD_IP)" (eq $root.Values.network.ipFamily "IPv6") }}:{{ int $ports.data }}
        - --metrics-listen={{ include "cleave.listen" (list $root $ports.admin) }}
        - --drain-timeout={{ int $pool.drainSeconds }}
        {{- with include "cleave.threads" $pool }}
        - --threads={{ . }}
        {{- end }}
        {{- with $pool.kvOffloading }}
        {{- if .size }}
        - --kv-offloading-size={{ .size }}B
        {{- end }}
        {{- if ne .dir.source "none" }}
        - --kv-offloading-dir=/var/lib/cleave/kv-offloading
        - --kv-offloading-dir-size={{ .dirSize }}B
        {{- end }}
        {{- end }}
        {{- if ne $pool.packedCache.source "none" }}
        - --packed-cache=/var/lib/cleave/packed-cache
        {{- end }}
        {{- if $root.Values.tls.peerSecretName }}
        - --peer-tls=/etc/cleave/peer-tls
        {{- end }}
        {{- range $pool.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- include "cleave.env" $root | nindent 8 }}
        {{- if eq $model.source "hub" }}
        - name: HF_HOME
          value: /model
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- end }}
        {{- with $pool.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with $pool.extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: admin
          containerPort: {{ int $ports.admin }}
          protocol: TCP
        - name: data
          containerPort: {{ int $ports.data }}
          protocol: TCP
      # The port opens only after the model is loaded and the engine is measured.
      startupProbe:
        httpGet:
          path: /health
          port: admin
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: {{ div (add (int $pool.startupSeconds) 1) 2 }}
      # /health reports forward progress: 503 when a step takes longer than --step-max.
      livenessProbe:
        httpGet:
          path: /health
          port: admin
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      # /ready needs forward progress and a connected router.
      readinessProbe:
        httpGet:
          path: /ready
          port: admin
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      securityContext: {{- include "cleave.containerSecurity" (ternary "" "IPC_LOCK" (empty $pool.rdma.resource)) | nindent 8 }}
      resources: {{- include "cleave.workerResources" $pool | nindent 8 }}
      volumeMounts:
        - name: shm
          mountPath: /dev/shm
        - name: cache
          mountPath: /var/cache/cleave
        {{- if ne $model.source "demo" }}
        - name: model
          mountPath: /model
          readOnly: true
        {{- end }}
        {{- if $root.Values.tls.peerSecretName }}
        - name: peer-tls
          mountPath: /etc/cleave/peer-tls
          readOnly: true
        {{- end }}
        {{- range $part, $storage := $storages }}
        - name: {{ $part }}
          mountPath: /var/lib/cleave/{{ $part }}
        {{- end }}
        {{- with $pool.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $pool.extraContainers }}
    {{- include "cleave.extraContainers" . | nindent 4 }}
    {{- end }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pool.sharedMemory.sizeLimit }}
    # The cache holds the unpacked bundled model, and kernels that were compiled at run time.
    - name: cache
      emptyDir:
        sizeLimit: 1Gi
    {{- if eq $model.source "hub" }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ include "cleave.hubClaim" $root }}
    {{- else if eq $model.source "pvc" }}
    - name: model
      persistentVolumeClaim:
        claimName: {{ $model.pvc.claimName }}
        readOnly: true
    {{- else if eq $model.source "hostPath" }}
    - name: model
      hostPath:
        path: {{ $model.hostPath.path }}
        type: Directory
    {{- else if eq $model.source "oci" }}
    # Pods of one node wait for the kubelet's one pull.
    - name: model
      image:
        reference: {{ $model.oci.reference | quote }}
        pullPolicy: {{ $model.oci.pullPolicy }}
    {{- else if eq $model.source "init" }}
    - name: model
      emptyDir:
        sizeLimit: {{ $model.init.sizeLimit }}
    {{- end }}
    {{- with $root.Values.tls.peerSecretName }}
    - name: peer-tls
      secret:
        secretName: {{ . }}
    {{- end }}
    {{- range $part, $storage := $storages }}
    {{- include "cleave.volume" (list $storage $part (include "cleave.named" (list $root $part))) | nindent 4 }}
    {{- end }}
    {{- with $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* (root, model): the init container of the user that fetches the model. */}}
{{- define "cleave.fetchByImage" -}}
{{- $root := index . 0 -}}{{- $model := index . 1 -}}
- name: model
  image: {{ $model.init.image | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  {{- with $model.init.command }}
  command: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $model.init.args }}
  args: {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    # Tools of the image write their caches to HOME; the root is read-only.
    - name: HOME
      value: /model
    {{- with $model.init.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  securityContext: {{- include "cleave.containerSecurity" "" | nindent 4 }}
  resources: {{- toYaml $model.init.resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
{{- end -}}

{{/* (root, pool): init containers that download the model and its adapters. One download at a time: the others wait for
     its lock, and then find the model in the volume. */}}
{{- define "cleave.fetchFromHub" -}}
{{- $root := index . 0 -}}{{- $pool := index . 1 -}}
{{- range $index, $name := $pool.model.hubNames }}
- name: pull-{{ $index }}
  image: {{ include "cleave.image" (list $root $pool.image) | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  args:
    - pull
    - --if-absent
    - {{ $name | quote }}
  env:
    {{- include "cleave.env" $root | nindent 4 }}
    - name: HF_HOME
      value: /model
    - name: HF_ENDPOINT
      value: {{ $root.Values.hub.endpoint | quote }}
    {{- with $root.Values.hub.tokenSecret }}
    {{- if .name }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ .name }}
          key: {{ .key }}
    {{- end }}
    {{- end }}
  securityContext: {{- include "cleave.containerSecurity" "" | nindent 4 }}
  resources: {{- toYaml $root.Values.hub.resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
{{- end }}
{{- end -}}

{{/* A pool's resources with its GPUs and RDMA devices; their counts are strings, since server-side apply refuses
     numbers. */}}
{{- define "cleave.workerResources" -}}
{{- $devices := dict -}}
{{- if ne (toString .gpus) "0" -}}{{- $_ := set $devices .gpuResource (toString .gpus) -}}{{- end -}}
{{- with .rdma -}}{{- if .resource -}}{{- $_ := set $devices .resource (toString .count) -}}{{- end -}}{{- end -}}
{{- $limits := merge $devices (default dict .resources.limits) -}}
{{- with .resources.requests -}}
requests: {{- toYaml . | nindent 2 }}
{{ end -}}
{{- with $limits -}}
limits:
  {{- range $resource, $count := . }}
  {{ $resource }}: {{ $count | toString | quote }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* A pool's writable storage by the names of its volumes, as JSON. */}}
{{- define "cleave.storages" -}}
{{- $storages := dict -}}
{{- range $part, $storage := dict "kv-offloading" .kvOffloading.dir "packed-cache" .packedCache -}}
{{- if ne $storage.source "none" -}}{{- $_ := set $storages $part $storage -}}{{- end -}}
{{- end -}}
{{- toJson $storages -}}
{{- end -}}
