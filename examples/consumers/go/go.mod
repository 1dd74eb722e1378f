module mailboat.dev/examples/orders-view

go 1.21

require github.com/lib/pq v1.10.9
