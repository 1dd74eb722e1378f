// Google's own fake of Pub/Sub (pstest) as a process of its own, so that it can be killed, suspended and restarted.
// It keeps everything in memory.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"cloud.google.com/go/pubsub/v2/pstest"
)

func main() {
	port := flag.Int("port", 8085, "port on the loopback interface")
	flag.Parse()

	server := pstest.NewServerWithPort(*port)
	fmt.Println("listening on", server.Addr)

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	if err := server.Close(); err != nil {
		fmt.Fprintln(os.Stderr, "pstest did not close cleanly:", err)
	}
}
