module mailboat.dev/devservers/pause

go 1.26.0
