module mailboat.dev/harbor/pause

go 1.26.0
