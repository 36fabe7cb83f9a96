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
{{- fail (printf "%s: needs the API monitoring.coreos.com/v1 of the Prometheus Operator, which this cluster lacks. Install it first, or leave %s false; where helm does not ask the cluster, add --api-versions monitoring.coreos.com/v1" .value .value) -}}
{{- end -}}
{{- end -}}

{{- define "unbroken.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "unbroken.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: is required while serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "unbroken.image" -}}
{{- $name := printf "%s:%s" .image.repository (default .appVersion .image.tag) -}}
{{- if .registry -}}{{- printf "%s/%s" (trimSuffix "/" .registry) $name -}}{{- else -}}{{- $name -}}{{- end -}}
{{- end -}}

{{- define "unbroken.webhookName" -}}
{{ include "unbroken.name" . }}-webhook
{{- end -}}

{{- /* Different for each way to make it, so that helm takes away only what it has made. */ -}}
{{- define "unbroken.webhookSecret" -}}
{{ include "unbroken.webhookName" . }}-{{ ternary "issued" "certificate" .Values.webhook.certManager.enabled }}
{{- end -}}

{{- /*
The webhook's certificate that helm has made, base64 by file, and when the next upgrade makes another one, in seconds
since 1970: the one in the cluster as long as it holds for two more years. Nothing when cert-manager makes it.
*/ -}}
{{- define "unbroken.webhookCertificate" -}}
{{- if not .Values.webhook.certManager.enabled -}}
{{- $now := now | unixEpoch | int64 -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (include "unbroken.webhookSecret" .) | default dict -}}
{{- $renewAfter := dig "metadata" "annotations" "unbroken.dev/renew-after" "0" $secret | int64 -}}
{{- $data := $secret.data | default dict -}}
{{- if and (gt $renewAfter $now) (index $data "ca.crt") (index $data "tls.crt") (index $data "tls.key") -}}
{{- toYaml (merge (dict "renewAfter" ($renewAfter | toString)) $data) -}}
{{- else -}}
{{- $days := 3650 -}}
{{- $name := printf "%s.%s.svc" (include "unbroken.webhookName" .) .Release.Namespace -}}
{{- $authority := genCA (printf "unbroken %s" .Release.Name) $days -}}
{{- $made := genSignedCert $name (list) (list $name) $days $authority -}}
{{- $renewAfter = add $now (mul 86400 (sub $days 730)) -}}
{{- toYaml (dict "renewAfter" ($renewAfter | toString) "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($made.Cert | b64enc) "tls.key" ($made.Key | b64enc)) -}}
{{- end -}}
{{- end -}}
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
  # Changed is only what leads to the rendezvous, when somebody else has changed it.
  verbs: [get, list, watch, create, patch]
# By name only: the operator neither lists nor watches Secrets. It changes the tokens in those of its own jobs, when
# somebody has replaced a job's key.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
