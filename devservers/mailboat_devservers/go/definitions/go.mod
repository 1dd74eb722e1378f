// Definitions of other people's resources, which the chart makes some of: no program is built from this.
module mailboat.dev/devservers/definitions

go 1.26

require (
	github.com/cert-manager/cert-manager v1.21.2
	github.com/prometheus-operator/prometheus-operator v0.85.0
)
