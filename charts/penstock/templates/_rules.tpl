{{/*
What operator and planner may do. The operator holds whatever it grants to routers (EndpointSlices, and Dynamo's register of workers),
because Kubernetes lets nobody grant more than they hold. Lists are
alphabetical; tests compare them with what the code says it calls. Kinds of others are granted where the cluster has them.
*/}}
{{- define "penstock.grants" -}}
{{- if eq (toString .value) "auto" -}}
{{- if .root.Capabilities.APIVersions.Has .kind }}true{{ end -}}
{{- else if .value }}true{{ end -}}
{{- end -}}

{{- define "penstock.operatorRules" -}}
- apiGroups: [""]
  resources: [configmaps, serviceaccounts, services]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
{{- if .Values.clusterWide }}
- apiGroups: [""]
  resources: [namespaces]
  verbs: [list, watch]
{{- end }}
- apiGroups: [""]
  resources: [pods]
  verbs: [delete, list, patch, watch]
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, delete, get, list, patch, watch]
{{- if .Values.rbac.profileRequests }}
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, get, list, patch, watch]
{{- end }}
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
{{- if include "penstock.grants" (dict "root" . "value" .Values.rbac.inferencePools "kind" "inference.networking.k8s.io/v1/InferencePool") }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [create, delete, get, list, patch, watch]
{{- end }}
{{- if include "penstock.grants" (dict "root" . "value" .Values.rbac.leaderWorkerSets "kind" "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet") }}
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [create, delete, get, list, patch, watch]
{{- end }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
{{- if include "penstock.grants" (dict "root" . "value" .Values.rbac.dynamo "kind" "nvidia.com/v1alpha1/DynamoWorkerMetadata") }}
- apiGroups: [nvidia.com]
  resources: [dynamoworkermetadatas]
  verbs: [create, get, list, patch, watch]
{{- end }}
{{- if .Values.clusterWide }}
- apiGroups: [penstock.dev]
  resources: [clustergpupools]
  verbs: [list, watch]
- apiGroups: [penstock.dev]
  resources: [clustergpupools/status]
  verbs: [patch]
{{- end }}
- apiGroups: [penstock.dev]
  resources: [graphdeployments]
  verbs: [get, list, patch, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments/finalizers, profilerequests/finalizers]
  verbs: [update]
- apiGroups: [penstock.dev]
  resources: [gpupools/status, graphdeployments/status, profilerequests/status, scalingadapters/status]
  verbs: [patch]
- apiGroups: [penstock.dev]
  resources: [gpupools, profilerequests]
  verbs: [list, watch]
- apiGroups: [penstock.dev]
  resources: [scalingadapters]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings, roles]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get]
{{- end -}}

{{- define "penstock.plannerRules" -}}
- apiGroups: [""]
  resources: [configmaps]
  {{- with .Values.rbac.profiles }}
  resourceNames: {{ toJson . }}
  {{- end }}
  verbs: [get]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments]
  verbs: [list, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments/status, scalingadapters/scale]
  verbs: [patch]
- apiGroups: [penstock.dev]
  resources: [scalingadapters]
  verbs: [get, list, patch, watch]
{{- end -}}

{{/* Whether the planner lives, which the operator says where it does not; takes the name of its Lease. */}}
{{- define "penstock.leaseReaderRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ . }}]
  verbs: [get]
{{- end -}}

{{/* The Lease by which replicas of a component agree who works; takes its name. */}}
{{- define "penstock.leaseRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ . }}]
  verbs: [get, patch, update]
{{- end -}}
