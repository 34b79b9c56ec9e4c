{{/* Metadata and spec of a router's pod. */}}
{{- define "cleave.routerPod" -}}
{{- $ports := .Values.network.ports -}}
{{- $byHpa := include "cleave.scalesBy" (list . "hpa") -}}
metadata:
  labels: {{- include "cleave.labels" (list . "router" .Values.router.podLabels) | nindent 4 }}
  {{- with .Values.router.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  # SIGTERM begins a drain: /ready answers 503, then new requests are refused, then the running streams end.
  terminationGracePeriodSeconds: {{ add (int .Values.router.shutdownDelaySeconds) (int .Values.router.drainSeconds) 15 }}
  {{- include "cleave.podPlacement" (list . .Values.router "router" "router") | nindent 2 }}
  {{- with .Values.router.extraInitContainers }}
  initContainers: {{- include "cleave.extraContainers" . | nindent 4 }}
  {{- end }}
  containers:
    - name: router
      image: {{ include "cleave.image" (list . dict) | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args:
        - router
        - --listen={{ include "cleave.listen" (list . $ports.http) }}
        - --admin-listen={{ include "cleave.listen" (list . $ports.admin) }}
        - --policy=/etc/cleave/policy/policy.yaml
        - --router-mode={{ .Values.router.mode }}
        - --placement={{ .Values.router.placement }}
        - --shutdown-delay={{ int .Values.router.shutdownDelaySeconds }}
        - --drain-timeout={{ int .Values.router.drainSeconds }}
        {{- if .Values.tls.secretName }}
        - --ssl-certfile=/etc/cleave/tls/tls.crt
        - --ssl-keyfile=/etc/cleave/tls/tls.key
        {{- end }}
        {{- if .Values.tls.peerSecretName }}
        - --peer-tls=/etc/cleave/peer-tls
        {{- end }}
        {{- if .Values.inferencePool.enabled }}
        - --ext-proc-listen={{ include "cleave.listen" (list . $ports.extProc) }}
        {{- with .Values.inferencePool.pickerTls }}
        - --ext-proc-tls={{ . }}
        {{- end }}
        - --picker-endpoints={{ include "cleave.routerAddress" . }}
        - --picker-admin-port={{ int $ports.admin }}
        {{- end }}
        {{- if $byHpa }}
        - --external-metrics-listen={{ include "cleave.listen" (list . $ports.externalMetrics) }}
        {{- end }}
        {{- if eq (include "cleave.asksFellows" .) "true" }}
        - --fellow-routers={{ include "cleave.named" (list . "router") }}.{{ .Release.Namespace }}.svc:{{ int $ports.admin }}
        {{- end }}
        {{- range .Values.router.extraArgs }}
        - {{ . | quote }}
        {{- end }}
      env:
        {{- include "cleave.env" . | nindent 8 }}
        {{- with .Values.router.adminKeySecret }}
        {{- if .name }}
        - name: CLEAVE_ADMIN_KEY
          valueFrom:
            secretKeyRef:
              name: {{ .name }}
              key: {{ .key }}
        {{- end }}
        {{- end }}
        {{- with .Values.router.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .Values.router.extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: http
          containerPort: {{ int $ports.http }}
          protocol: TCP
        - name: admin
          containerPort: {{ int $ports.admin }}
          protocol: TCP
        {{- if .Values.inferencePool.enabled }}
        - name: ext-proc
          containerPort: {{ int $ports.extProc }}
          protocol: TCP
        {{- end }}
        {{- if $byHpa }}
        - name: ext-metrics
          containerPort: {{ int $ports.externalMetrics }}
          protocol: TCP
        {{- end }}
      startupProbe:
        httpGet:
          path: /health
          port: admin
        periodSeconds: 1
        failureThreshold: 30
      livenessProbe:
        httpGet:
          path: /health
          port: admin
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        httpGet:
          # Clients must reach a router without workers if a pool may be empty: waiting requests are the demand.
          path: {{ ternary "/health" "/ready" (eq (include "cleave.scalesToZero" .) "true") }}
          port: admin
        {{- if eq (include "cleave.scalesToZero" .) "true" }}
        # Running workers connect before the first probe: they look up the router's name every ten seconds.
        initialDelaySeconds: 15
        {{- end }}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
      securityContext: {{- include "cleave.containerSecurity" "" | nindent 8 }}
      resources: {{- toYaml .Values.router.resources | nindent 8 }}
      volumeMounts:
        # The mount is a folder: the kubelet does not update a file that is mounted by subPath.
        - name: policy
          mountPath: /etc/cleave/policy
          readOnly: true
        - name: cache
          mountPath: /var/cache/cleave
        {{- if .Values.tls.secretName }}
        - name: tls
          mountPath: /etc/cleave/tls
          readOnly: true
        {{- end }}
        {{- if .Values.tls.peerSecretName }}
        - name: peer-tls
          mountPath: /etc/cleave/peer-tls
          readOnly: true
        {{- end }}
        {{- with .Values.router.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .Values.router.extraContainers }}
    {{- include "cleave.extraContainers" . | nindent 4 }}
    {{- end }}
  volumes:
    - name: policy
      configMap:
        name: {{ default (include "cleave.named" (list . "policy")) .Values.policy.existingConfigMap }}
    - name: cache
      emptyDir:
        sizeLimit: 64Mi
    {{- with .Values.tls.secretName }}
    - name: tls
      secret:
        secretName: {{ . }}
    {{- end }}
    {{- with .Values.tls.peerSecretName }}
    - name: peer-tls
      secret:
        secretName: {{ . }}
    {{- end }}
    {{- with .Values.router.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
