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

{{- /* JSON list of the namespaces that are served; empty: all. */ -}}
{{- define "unbroken.namespaces" -}}
{{- if eq .Values.scope "Namespaces" -}}
{{- prepend (.Values.namespaces | default list) .Release.Namespace | uniq | toJson -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{- /* The full name of an image; .value is image or sidecarImage. Fails unless it says in which registry. */ -}}
{{- define "unbroken.image" -}}
{{- $image := index .root.Values .value -}}
{{- $registry := .root.Values.registry | default "" | trimSuffix "/" -}}
{{- $tag := $image.tag | default "" -}}
{{- if contains "://" $registry -}}
{{- fail (printf "registry: want a host and perhaps a path (registry.example.com/team), without %s//, got %q" (first (splitList "//" $registry)) .root.Values.registry) -}}
{{- end -}}
{{- if and $registry (not (regexMatch "^[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*$" $registry)) -}}
{{- fail (printf "registry: want a host and perhaps a path (registry.example.com:5000/team), got %q" .root.Values.registry) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*(@sha256:[0-9a-f]{64})?$" $image.repository) -}}
{{- fail (printf "%s.repository: want a name without a tag (the tag or digest is %s.tag), or one that ends with @sha256: and 64 hexadecimal digits, got %q" .value .value $image.repository) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|sha256:[0-9a-f]{64}|)$" $tag) -}}
{{- fail (printf "%s.tag: want a tag, or a digest (sha256: and 64 hexadecimal digits), got %q" .value $tag) -}}
{{- end -}}
{{- $isDigest := contains "@" $image.repository -}}
{{- if and $isDigest $tag -}}
{{- fail (printf "%s.tag: want none beside the digest in %s.repository, got %q" .value .value $tag) -}}
{{- end -}}
{{- $name := $image.repository -}}
{{- if not $isDigest -}}
{{- $name = printf "%s%s%s" $name (ternary "@" ":" (hasPrefix "sha256:" $tag)) (default .root.Chart.AppVersion $tag) -}}
{{- end -}}
{{- $hasHost := include "unbroken.hasHost" $image.repository -}}
{{- if $hasHost -}}
{{- $name -}}
{{- else if not $registry -}}
{{- fail (printf "registry: is required: the container runtime would look for %s in its default registry, where that name may be somebody else's. Set registry=registry.example.com/team, or a full name in %s.repository" $name .value) -}}
{{- else if not (include "unbroken.hasHost" (printf "%s/" $registry)) -}}
{{- fail (printf "registry: want its host first (docker.io/%s for Docker Hub), got %q" $registry .root.Values.registry) -}}
{{- else -}}
{{- printf "%s/%s" $registry $name -}}
{{- end -}}
{{- end -}}

{{- /* Not empty if the name of an image begins with a registry's host, as container runtimes tell it from a path. */ -}}
{{- define "unbroken.hasHost" -}}
{{- if regexMatch "^(localhost|[^/]*[.:][^/]*)/" . -}}true{{- end -}}
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
# By name, those of training pods on a node with a tainted device.
- apiGroups: [resource.k8s.io]
  resources: [resourceclaims]
  verbs: [get]
{{- if (.Values.jobNetworkPolicy).enabled }}
# Made together with a rendezvous pod, and then left alone; it goes with its job.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- end }}
{{- end -}}

{{- /* CEL: whether the created `object` belongs to the job whose name and uid it bears. */ -}}
{{- define "unbroken.isMadeForJob" -}}
has(object.metadata.labels) && has(object.metadata.annotations) && has(object.metadata.ownerReferences)
&& 'unbroken.dev/job' in object.metadata.labels && 'unbroken.dev/component' in object.metadata.labels
&& object.metadata.labels['unbroken.dev/component'] in ['rendezvous', 'tokens', 'trainer']
&& 'unbroken.dev/job-uid' in object.metadata.annotations
&& object.metadata.ownerReferences.exists(r, r.apiVersion.startsWith('unbroken.dev/')
&& r.kind == 'ResilientTrainingJob' && has(r.controller) && r.controller
&& r.name == object.metadata.labels['unbroken.dev/job']
&& r.uid == object.metadata.annotations['unbroken.dev/job-uid'])
{{- end -}}

{{- /* CEL: whether `.` (object or oldObject) is a job's; its owner or its annotation may have been taken off by hand. */ -}}
{{- define "unbroken.isOfJob" -}}
(has({{ . }}.metadata.annotations) && 'unbroken.dev/job-uid' in {{ . }}.metadata.annotations)
|| (has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(r,
r.apiVersion.startsWith('unbroken.dev/') && r.kind == 'ResilientTrainingJob'))
{{- end -}}

{{- /* CEL: whether a pod looks like one of a job. */ -}}
{{- define "unbroken.claimsToBeOfJob" -}}
(has({{ . }}.metadata.labels) && {{ . }}.metadata.labels.exists(k, k.startsWith('unbroken.dev/')))
|| (has({{ . }}.metadata.annotations) && {{ . }}.metadata.annotations.exists(k, k.startsWith('unbroken.dev/')))
|| (has({{ . }}.metadata.ownerReferences) && {{ . }}.metadata.ownerReferences.exists(r,
r.apiVersion.startsWith('unbroken.dev/') && r.kind == 'ResilientTrainingJob'))
{{- end -}}

{{- /*
CEL: whether an update leaves all fields of .part (metadata, spec, status) as they are, but those of which the CEL
.but, about a field's name `f`, is true. It asks whatever fields there are: newer ones of Kubernetes as well.
*/ -}}
{{- define "unbroken.sameFields" -}}
{{- $new := printf "object.%s" .part -}}
{{- $old := printf "oldObject.%s" .part -}}
(!has({{ $new }}) || dyn({{ $new }}).all(f, {{ .but }}
|| (has({{ $old }}) && f in dyn({{ $old }}) && dyn({{ $new }})[f] == dyn({{ $old }})[f])))
&& (!has({{ $old }}) || dyn({{ $old }}).all(f, {{ .but }} || (has({{ $new }}) && f in dyn({{ $new }}))))
{{- end -}}

{{- /*
CEL: whether the update of a node leaves its metadata as they are: labels, owners, finalizers and all, but the
annotation of quarantine, and this only together with the taint. What the API server itself keeps there goes on.
*/ -}}
{{- define "unbroken.onlyMarkDiffers" -}}
request.operation != 'UPDATE' || (
{{ include "unbroken.sameFields" (dict "part" "metadata" "but" "f in ['annotations', 'managedFields', 'resourceVersion']") }}
&& (!has(object.metadata.annotations) || object.metadata.annotations.all(key,
(key == 'unbroken.dev/quarantine' && request.subResource != 'status')
|| (has(oldObject.metadata.annotations) && key in oldObject.metadata.annotations
&& object.metadata.annotations[key] == oldObject.metadata.annotations[key])))
&& (!has(oldObject.metadata.annotations) || oldObject.metadata.annotations.all(key,
(key == 'unbroken.dev/quarantine' && request.subResource != 'status')
|| (has(object.metadata.annotations) && key in object.metadata.annotations))))
{{- end -}}

{{- /* CEL: whether the update of a node leaves its spec as it is but the taint of quarantine, which evicts nothing. */ -}}
{{- define "unbroken.onlyTaintDiffers" -}}
request.operation != 'UPDATE' || request.subResource == 'status' || (
{{ include "unbroken.sameFields" (dict "part" "spec" "but" "f == 'taints'") }}
&& (!has(object.spec) || !has(object.spec.taints) || object.spec.taints.all(t,
(t.key == 'unbroken.dev/quarantine' && t.effect == 'NoSchedule')
|| (has(oldObject.spec) && has(oldObject.spec.taints) && t in oldObject.spec.taints)))
&& (!has(oldObject.spec) || !has(oldObject.spec.taints) || oldObject.spec.taints.all(t,
t.key == 'unbroken.dev/quarantine' || (has(object.spec) && has(object.spec.taints) && t in object.spec.taints))))
{{- end -}}

{{- /* CEL: whether the update of a node's status leaves all as it is but the condition of quarantine.condition. */ -}}
{{- define "unbroken.onlyConditionDiffers" -}}
request.subResource != 'status' || (has(object.status) && has(oldObject.status)
&& {{ include "unbroken.sameFields" (dict "part" "status" "but" "f == 'conditions'") }}
&& (!has(object.status.conditions) || object.status.conditions.all(c, c.type == 'UnbrokenRepeatOffender'
|| (has(oldObject.status.conditions) && c in oldObject.status.conditions)))
&& (!has(oldObject.status.conditions) || oldObject.status.conditions.all(c, c.type == 'UnbrokenRepeatOffender'
|| (has(object.status.conditions) && c in object.status.conditions)))
&& (!has(object.status.conditions) || !has(oldObject.status.conditions)
|| object.status.conditions.filter(c, c.type != 'UnbrokenRepeatOffender').size()
== oldObject.status.conditions.filter(c, c.type != 'UnbrokenRepeatOffender').size()))
{{- end -}}

{{- /* Not empty if policies keep the operator's account to the objects of its jobs. */ -}}
{{- define "unbroken.hasPolicies" -}}
{{- $wanted := (.Values.admissionPolicy).enabled | default "Auto" -}}
{{- if or (eq $wanted "Always") (and (eq $wanted "Auto") (eq .Values.scope "Cluster") (include "unbroken.knowsPolicies" .)) -}}true{{- end -}}
{{- end -}}

{{- /* Not empty if a policy keeps it to its taint and its condition: in any scope, since nodes are the cluster's. */ -}}
{{- define "unbroken.hasNodePolicy" -}}
{{- $isAuto := eq ((.Values.admissionPolicy).enabled | default "Auto") "Auto" -}}
{{- if or (include "unbroken.hasPolicies" .) (and $isAuto (include "unbroken.writesNodes" .) (include "unbroken.knowsPolicies" .)) -}}true{{- end -}}
{{- end -}}

{{- define "unbroken.knowsPolicies" -}}
{{- if semverCompare ">=1.30.0-0" .Capabilities.KubeVersion.Version -}}true{{- end -}}
{{- end -}}

{{- /* Not empty if the operator's account may patch nodes, or their status. */ -}}
{{- define "unbroken.writesNodes" -}}
{{- if or (eq (toString (.Values.quarantine).mode) "On") (.Values.quarantine).condition -}}true{{- end -}}
{{- end -}}
