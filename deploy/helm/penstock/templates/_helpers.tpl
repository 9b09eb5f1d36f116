{{- define "penstock.name" -}}
{{- $name := printf "%s-%s" .root.Release.Name .name -}}
{{- if gt (len $name) 52 }}{{ fail (printf "the name %s is longer than 52 characters: choose a shorter release or tier" $name) }}{{ end -}}
{{- $name -}}
{{- end }}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- with .group }}
penstock/workers: {{ . }}
{{- end }}
{{- end }}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "penstock.image" -}}
{{- $images := dict "judge" "worker" "admin" "router" -}}
{{- printf "%spenstock-mesh-%s:%s" .root.Values.image.registry (get $images .role | default .role) (.root.Values.image.tag | default .root.Chart.AppVersion) -}}
{{- end }}

{{- define "penstock.tls" -}}
{{- if or .Values.tls.secret .Values.tls.certManager.issuer }}true{{ end -}}
{{- end }}

{{- define "penstock.redisSecret" -}}
{{- .Values.redis.secret | default (printf "%s-redis" .Release.Name) -}}
{{- end }}

{{/* Of a container that is restricted as far as Kubernetes can. The number is the user of the image, and its group. */}}
{{- define "penstock.restricted" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "penstock.env" -}}
{{- $values := .root.Values -}}
- name: HOME
  value: /tmp
{{- if ne .role "admin" }}
- name: PENSTOCK_ADVERTISE_HOST
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: PENSTOCK_ADMIN_HOST
  value: 0.0.0.0
- name: PENSTOCK_DRAIN_S
  value: {{ $values.drainSeconds | quote }}
- name: PENSTOCK_REDIS_URL
  valueFrom: { secretKeyRef: { name: {{ include "penstock.redisSecret" .root }}, key: {{ .role }}-url } }
{{- if $values.access.open }}
- name: PENSTOCK_OPEN_ACCESS
  value: "true"
{{- end }}
{{- with $values.telemetry.otlpEndpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- else }}
- name: PENSTOCK_ADMIN
  value: {{ .root.Release.Name }}-admin:50052
{{- end }}
{{- if include "penstock.tls" .root }}
- name: PENSTOCK_TLS_FOLDER
  value: /etc/penstock/tls
{{- end }}
{{- if and (eq .role "router") $values.access.keysSecret }}
- name: PENSTOCK_KEYS_FILE
  value: /etc/penstock/keys/keys.json
{{- end }}
{{- include "penstock.hubEnv" . }}
{{- end }}

{{/* Where models from the hub are. SGLang writes as root, so its downloads have a folder of their own, which its worker reads. */}}
{{- define "penstock.hubEnv" -}}
{{- $values := .root.Values -}}
{{- if and (has .role (list "worker" "judge" "sglang")) (eq $values.models.source "hub") }}
- name: HF_HOME
  value: {{ ternary "/hub/sglang" "/hub/penstock" (or (eq .role "sglang") (.shared | default false)) }}
- name: HF_HUB_OFFLINE
  value: {{ ternary "1" "0" (.shared | default false) | quote }}
{{- with $values.models.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ . }}, key: token } }
{{- end }}
{{- end }}
{{- end }}

{{/* Mounts of models, for containers that load them. */}}
{{- define "penstock.modelMounts" -}}
{{- $models := .Values.models -}}
{{- if eq $models.source "hub" }}
- { name: models, mountPath: /hub }
{{- else if ne $models.source "none" }}
- { name: models, mountPath: {{ $models.path }}, readOnly: true }
{{- end }}
{{- end }}

{{- define "penstock.modelVolume" -}}
{{- $models := .Values.models -}}
{{- if eq $models.source "claim" }}
- name: models
  persistentVolumeClaim: { claimName: {{ required "models.claim.name: missing" $models.claim.name }}, readOnly: true }
{{- else if eq $models.source "image" }}
- name: models
  image: { reference: {{ required "models.image.reference: missing" $models.image.reference }}, pullPolicy: {{ $models.image.pullPolicy }} }
{{- else if eq $models.source "hub" }}
- name: models
{{- if $models.hub.cacheClaim }}
  persistentVolumeClaim: { claimName: {{ $models.hub.cacheClaim }} }
{{- else }}
  emptyDir: { sizeLimit: {{ $models.hub.cacheSize }} }
{{- end }}
{{- end }}
{{- end }}

{{/* Mounts of what the role reads besides models. */}}
{{- define "penstock.mounts" -}}
- { name: tmp, mountPath: /tmp }
{{- if ne .role "admin" }}
- { name: mesh, mountPath: /etc/penstock/mesh.yaml, subPath: mesh.yaml, readOnly: true }
{{- end }}
{{- if include "penstock.tls" .root }}
- { name: tls, mountPath: /etc/penstock/tls, readOnly: true }
{{- end }}
{{- if and (eq .role "router") .root.Values.access.keysSecret }}
- { name: keys, mountPath: /etc/penstock/keys, readOnly: true }
{{- end }}
{{- if and (ne .role "admin") .root.Values.redis.caSecret }}
- { name: redis-ca, mountPath: /etc/penstock/redis, readOnly: true }
{{- end }}
{{- end }}

{{- define "penstock.volumes" -}}
{{- $values := .root.Values -}}
- name: tmp
  emptyDir: { sizeLimit: 1Gi }
{{- if ne .role "admin" }}
- name: mesh
  configMap: { name: {{ .root.Release.Name }}-mesh }
{{- end }}
{{- if $values.tls.secret }}
- name: tls
  secret:
    secretName: {{ $values.tls.secret }}
    defaultMode: 0440
    items: [{ key: ca.pem, path: ca.pem }, { key: {{ .role }}.pem, path: {{ .role }}.pem }]
{{- else if $values.tls.certManager.issuer }}
- name: tls
  secret:
    secretName: {{ .root.Release.Name }}-{{ .role }}-tls
    defaultMode: 0440
    items: [{ key: ca.crt, path: ca.pem }, { key: tls-combined.pem, path: {{ .role }}.pem }]
{{- end }}
{{- if and (eq .role "router") $values.access.keysSecret }}
- name: keys
  secret: { secretName: {{ $values.access.keysSecret }}, defaultMode: 0440 }
{{- end }}
{{- if and (ne .role "admin") $values.redis.caSecret }}
- name: redis-ca
  secret: { secretName: {{ $values.redis.caSecret }}, defaultMode: 0440 }
{{- end }}
{{- end }}

{{/* Is it alive, and should it get requests? The router says so over HTTP. The others speak gRPC: with certificates, which
     a probe of Kubernetes has not, by a command. */}}
{{- define "penstock.probes" -}}
{{- $tls := include "penstock.tls" .root -}}
{{- $start := max 1 (div (.startSeconds | default 120) 5) -}}
{{- if eq .role "router" }}
{{- $scheme := ternary "HTTPS" "HTTP" (eq $tls "true") }}
startupProbe: { httpGet: { path: /livez, port: http, scheme: {{ $scheme }} }, periodSeconds: 5, failureThreshold: {{ $start }} }
readinessProbe: { httpGet: { path: /readyz, port: http, scheme: {{ $scheme }} }, periodSeconds: 5 }
livenessProbe: { httpGet: { path: /livez, port: http, scheme: {{ $scheme }} }, periodSeconds: 10, failureThreshold: 6 }
{{- else }}
{{- $check := ternary "exec: { command: [python, /opt/penstock/healthcheck.py] }, timeoutSeconds: 5" "grpc: { port: 50051 }" (eq $tls "true") }}
startupProbe: { {{ $check }}, periodSeconds: 5, failureThreshold: {{ $start }} }
readinessProbe: { {{ $check }}, periodSeconds: 10 }
livenessProbe: { {{ $check }}, periodSeconds: 20, failureThreshold: 6 }
{{- end }}
{{- end }}

{{/* A container of one of our images. root, role; tier, endpoint, resources, startSeconds. */}}
{{- define "penstock.container" -}}
- name: {{ .role }}
  image: {{ include "penstock.image" . }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [penstock.{{ .role }}_service]
  env:
    {{- include "penstock.env" . | nindent 4 }}
    {{- with .tier }}
    - name: PENSTOCK_TIER
      value: {{ . | quote }}
    {{- end }}
    {{- with .endpoint }}
    - name: PENSTOCK_SGLANG_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with (get .root.Values .role).env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - { name: grpc, containerPort: 50051 }
    - { name: admin, containerPort: 50052 }
    - { name: metrics, containerPort: 9464 }
    {{- if eq .role "router" }}
    - { name: http, containerPort: 8000 }
    {{- end }}
  {{- include "penstock.probes" . | nindent 2 }}
  {{- if eq .role "router" }}
  lifecycle: # until no one sends requests here any more; SIGTERM then lets the running ones end
    preStop: { exec: { command: [sleep, "5"] } }
  {{- end }}
  resources:
    {{- toYaml .resources | nindent 4 }}
  securityContext:
    {{- include "penstock.restricted" 10001 | nindent 4 }}
  volumeMounts:
    {{- include "penstock.mounts" . | nindent 4 }}
    {{- if has .role (list "worker" "judge") }}
    {{- include "penstock.modelMounts" .root | nindent 4 }}
    {{- end }}
{{- end }}

{{/* What every pod's specification has. root, role; gpuType. */}}
{{- define "penstock.pod" -}}
{{- $values := .root.Values -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .role }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext: { fsGroup: 10001, fsGroupChangePolicy: OnRootMismatch, seccompProfile: { type: RuntimeDefault } }
terminationGracePeriodSeconds: {{ add $values.drainSeconds 15 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- $type := .gpu | default dict }}
{{- with merge (dict) ($type.nodeSelector | default dict) $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat ($type.tolerations | default list) $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $type.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}

{{- define "penstock.podMetadata" -}}
annotations:
  checksum/mesh: {{ .root.Values.mesh | sha256sum }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
