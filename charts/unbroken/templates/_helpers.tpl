{{- define "unbroken.name" -}}
{{- printf "%s" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "unbroken.selector" -}}
app.kubernetes.io/name: unbroken-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "unbroken.labels" -}}
{{ include "unbroken.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "unbroken.testSelector" -}}
app.kubernetes.io/name: unbroken-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* The labels of the chart and those of .labels, which your Prometheus or Grafana selects by. */ -}}
{{- define "unbroken.monitorLabels" -}}
{{ include "unbroken.labels" .root }}
{{- with .labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "unbroken.wantMonitoring" -}}
{{- if not (.capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- fail (printf "%s: want the API monitoring.coreos.com/v1 of the Prometheus Operator, got none in this cluster; install it first, leave %s false, or, where helm does not ask the cluster, give --api-versions monitoring.coreos.com/v1" .value .value) -}}
{{- end -}}
{{- end -}}

{{- define "unbroken.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "unbroken.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: want the name of a service account, since serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "unbroken.image" -}}
{{- $name := printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}
{{- if .registry -}}{{- printf "%s/%s" (trimSuffix "/" .registry) $name -}}{{- else -}}{{- $name -}}{{- end -}}
{{- end -}}

{{- /* What the operator does in a namespace with jobs, and nothing else. */ -}}
{{- define "unbroken.jobRules" -}}
- apiGroups: [unbroken.dev]
  resources: [resilienttrainingjobs]
  # Deleted is only what has ended, after spec.ttlSecondsAfterFinished.
  verbs: [get, list, watch, delete]
- apiGroups: [unbroken.dev]
  resources: [resilienttrainingjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create]
# By name only: the operator neither lists nor watches Secrets.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
