{{/*
What operator and planner may do. The operator holds whatever it grants to routers (EndpointSlices), because
Kubernetes lets nobody grant more than they hold. Lists are alphabetical; tests compare them with what the code
says it calls.
*/}}
{{- define "penstock.operatorRules" -}}
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts, services]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments]
  verbs: [get, list, patch, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments/finalizers]
  verbs: [update]
- apiGroups: [penstock.dev]
  resources: [graphdeployments/status, scalingadapters/status]
  verbs: [patch]
- apiGroups: [penstock.dev]
  resources: [scalingadapters]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings, roles]
  verbs: [create, delete, get, list, patch, watch]
{{- end -}}

{{- define "penstock.plannerRules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments, scalingadapters]
  verbs: [get, list, watch]
- apiGroups: [penstock.dev]
  resources: [graphdeployments/status, scalingadapters, scalingadapters/scale]
  verbs: [patch]
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
