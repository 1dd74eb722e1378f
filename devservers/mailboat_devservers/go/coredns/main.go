// CoreDNS with the few plugins that a cluster for tests needs: the full set is six times the size and takes minutes.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"
)

func init() {
	// Also the order in which they see a query.
	dnsserver.Directives = []string{"bind", "health", "ready", "errors", "cache", "kubernetes"}
}

func main() { coremain.Run() }
