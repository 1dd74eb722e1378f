// A Kafka-protocol broker for tests and the demo: kfake of franz-go as a process of its own, so that it can be
// killed, suspended and restarted like any other broker.
package main

import (
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/twmb/franz-go/pkg/kfake"
)

func main() {
	port := flag.Int("port", 9092, "port on the loopback interface")
	partitions := flag.Int("partitions", 4, "partitions of a topic whose creator does not say how many")
	dir := flag.String("dir", "", "data directory; empty keeps everything in memory")
	sync := flag.Bool("sync", true, "with -dir: flush every write before it is acknowledged")
	autoCreate := flag.Bool("auto-create", false, "create topics on first use; such a topic does not survive SIGKILL")
	flag.Parse()

	options := []kfake.Opt{kfake.NumBrokers(1), kfake.Ports(*port), kfake.DefaultNumPartitions(*partitions)}
	if *dir != "" {
		options = append(options, kfake.DataDir(*dir))
		if *sync {
			options = append(options, kfake.SyncWrites())
		}
	}
	if *autoCreate {
		options = append(options, kfake.AllowAutoTopicCreation())
	}
	cluster, err := kfake.NewCluster(options...)
	if err != nil {
		fmt.Fprintln(os.Stderr, "kfake can't start:", err)
		os.Exit(1)
	}
	fmt.Println("listening on", cluster.ListenAddrs())

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	cluster.Close()
}
