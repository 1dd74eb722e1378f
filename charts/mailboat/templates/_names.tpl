{{/* Names and labels, written down once. Names of cluster-wide objects end in the namespace, so that two releases of
     the same name in two namespaces do not meet. */}}

{{- define "mailboat.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "mailboat.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "mailboat.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "mailboat.operator" -}}{{ include "mailboat.fullname" . }}-operator{{- end }}
{{- define "mailboat.webhook" -}}{{ include "mailboat.fullname" . }}-webhook{{- end }}
{{- define "mailboat.webhookCert" -}}{{ include "mailboat.fullname" . }}-webhook-cert{{- end }}
{{- define "mailboat.signingKeys" -}}{{ include "mailboat.fullname" . }}-signing-keys{{- end }}
{{- define "mailboat.operatorInCluster" -}}{{ include "mailboat.operator" . }}.{{ .Release.Namespace }}{{- end }}
{{- define "mailboat.webhookInCluster" -}}{{ include "mailboat.webhook" . }}.{{ .Release.Namespace }}{{- end }}

{{- define "mailboat.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "mailboat.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required where serviceAccount.create is false: name the account that the operator runs as" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{- define "mailboat.selector" -}}
app.kubernetes.io/name: mailboat-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "mailboat.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "mailboat.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: mailboat
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* An image by digest, else by tag. Takes {image, root}. */}}
{{- define "mailboat.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ default .root.Chart.AppVersion .image.tag }}
{{- end -}}
{{- end }}
