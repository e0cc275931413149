{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select one component's pods; takes (dict "root" $ "component" NAME). */}}
{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of every object; takes (dict "root" $ "component" NAME), and as "labels" those of its kind. */}}
{{- define "penstock.labels" -}}
{{- with merge (dict) (default (dict) .labels) .root.Values.commonLabels -}}
{{ toYaml . }}
{{ end -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of every pod; takes the same. */}}
{{- define "penstock.podLabels" -}}
{{- with merge (dict) (default (dict) .labels) .root.Values.commonLabels -}}
{{ toYaml . }}
{{ end -}}
{{ include "penstock.selectorLabels" . }}
{{- end -}}

{{- define "penstock.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What podTemplates may have, as --allow-pod-templates takes it; empty where it is the default; takes podTemplates.allow or a profile. */}}
{{- define "penstock.allowances" -}}
{{- $entries := list -}}
{{- range $key, $value := . -}}
{{- if kindIs "slice" $value -}}
{{- if not (and (eq $key "secrets") (eq (toJson $value) "[\"*\"]")) -}}
{{- range $value }}{{ $entries = append $entries (printf "%s=%s" $key .) }}{{ end -}}
{{- end -}}
{{- else if $value -}}
{{- $entries = append $entries $key -}}
{{- end -}}
{{- end -}}
{{- join "," $entries -}}
{{- end -}}

{{/* Profiles of podTemplates, as --pod-template-profiles takes them. */}}
{{- define "penstock.profiles" -}}
{{- $profiles := list -}}
{{- range $name, $allow := .Values.podTemplates.profiles -}}
{{- $profiles = append $profiles (printf "%s:%s" $name (include "penstock.allowances" $allow)) -}}
{{- end -}}
{{- join ";" $profiles -}}
{{- end -}}

{{/* Whether everywhere or in any profile podTemplates may have this; takes (dict "root" $ "key" KEY). */}}
{{- define "penstock.anywhere" -}}
{{- $key := .key -}}
{{- range append (values .root.Values.podTemplates.profiles) .root.Values.podTemplates.allow -}}
{{- if or .everything (index . $key) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.tensorboardImage" -}}
{{- $tag := default (printf "%s-tensorboard" (default .Chart.AppVersion .Values.image.tag)) .Values.tensorboard.image.tag -}}
{{- printf "%s:%s" (default .Values.image.repository .Values.tensorboard.image.repository) $tag -}}
{{- end -}}

{{/* ServiceAccount of a component; takes (dict "root" $ "component" NAME). */}}
{{- define "penstock.serviceAccount" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- if $account.name -}}
{{- $account.name -}}
{{- else if $account.create -}}
{{- printf "%s-%s" (include "penstock.fullname" .root) .component -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/*
What one operator or planner looks at, as a JSON list of {namespace, suffix}: one entry with an empty namespace
when cluster-wide, otherwise one per watched namespace. The suffix keeps their names apart.
*/}}
{{- define "penstock.scopes" -}}
{{- $scopes := list -}}
{{- if .Values.clusterWide -}}
{{- $scopes = list (dict "namespace" "" "suffix" "") -}}
{{- else if .Values.watchNamespaces -}}
{{- $only := eq (len .Values.watchNamespaces) 1 -}}
{{- range .Values.watchNamespaces -}}
{{- $scopes = append $scopes (dict "namespace" . "suffix" (ternary "" (printf "-%s" .) $only)) -}}
{{- end -}}
{{- else -}}
{{- $scopes = list (dict "namespace" .Release.Namespace "suffix" "") -}}
{{- end -}}
{{- toJson $scopes -}}
{{- end -}}

{{- define "penstock.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "penstock.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Placement and pull secrets of a component's pods; takes (dict "root" $ "component" NAME). */}}
{{- define "penstock.podPlacement" -}}
{{- $values := index .root.Values .component -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of the claim with the planner's logs; empty for an emptyDir. */}}
{{- define "penstock.logsClaim" -}}
{{- if .Values.planner.logs.existingClaim -}}
{{- .Values.planner.logs.existingClaim -}}
{{- else if .Values.planner.logs.size -}}
{{- printf "%s-planner-logs" (include "penstock.fullname" .) -}}
{{- end -}}
{{- end -}}

{{/* Whether the logs' volume can be mounted on one node alone; empty if not, or if there is none. */}}
{{- define "penstock.logsOneNode" -}}
{{- if and (include "penstock.logsClaim" .) (not (has "ReadWriteMany" .Values.planner.logs.accessModes)) -}}
true
{{- end -}}
{{- end -}}

{{/* Label of the pods that mount the logs' claim: the ones before an upgrade may run without it, or with another. */}}
{{- define "penstock.logsLabel" -}}
penstock.dev/logs: {{ include "penstock.logsClaim" . | trunc 63 | trimAll "-." | quote }}
{{- end -}}

{{/*
Affinity of all pods that mount such a volume to each other. To the planner alone would not do: a new planner's pod
could go to another node while TensorBoard still holds the volume.
*/}}
{{- define "penstock.logsAffinity" -}}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/instance: {{ .Release.Name }}
            {{- include "penstock.logsLabel" . | nindent 12 }}
{{- end -}}

{{/* Egress that everything with an API client needs: DNS and the API server. */}}
{{- define "penstock.apiEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
- ports:
    {{- range .Values.networkPolicy.apiServerPorts }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}

{{/* Egress to the HTTP port of every graph's routers and workers. */}}
{{- define "penstock.graphEgress" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchExpressions:
          - {key: penstock.dev/graph, operator: Exists}
  ports:
    - {port: 8000, protocol: TCP}
{{- end -}}
