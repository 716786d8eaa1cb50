{{/* Names, labels and addresses that several templates share. */}}

{{- define "distserve.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 30 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 30 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "distserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "distserve.labels" -}}
{{ include "distserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "distserve.channelKeySecret" -}}
{{ .Values.channelKey.existingSecret | default (printf "%s-channel-key" (include "distserve.fullname" .)) }}
{{- end -}}

{{/*
The placement with the address of each node's pod. The full name is in the pod's own /etc/hosts from its start.
*/}}
{{- define "distserve.placement" -}}
{{- $name := include "distserve.fullname" . -}}
{{- $placement := deepCopy .Values.placement -}}
{{- if gt (len .Values.nodes) 1 -}}
{{- range $placement.nodes -}}
{{- $host := printf "%s-%s-0.%s-nodes.%s.svc.%s" $name .name $name $.Release.Namespace $.Values.clusterDomain -}}
{{- $_ := set . "host" $host -}}
{{- $_ := set . "grpc_port" ($.Values.ports.grpc | int) -}}
{{- end -}}
{{- end -}}
{{ toYaml $placement }}
{{- end -}}
