// Google's own fake of Pub/Sub (pstest) as a process of its own, so that it can be killed, suspended and restarted.
// It keeps everything in memory.
//
// The fake takes what Google's service would refuse, so a message may ask to be refused: one with the attribute
// `pstest-refusals: N` has its request answered with INVALID_ARGUMENT for the first N times that it comes.
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"

	"cloud.google.com/go/pubsub/v2/apiv1/pubsubpb"
	"cloud.google.com/go/pubsub/v2/pstest"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const refusals = "pstest-refusals"

// refuser counts by topic and data, since a message has no identity before it is taken.
type refuser struct {
	lock sync.Mutex
	seen map[string]int
}

func (r *refuser) React(request any) (handled bool, answer any, err error) {
	publish, ok := request.(*pubsubpb.PublishRequest)
	if !ok {
		return false, nil, nil
	}
	r.lock.Lock()
	defer r.lock.Unlock()
	for _, message := range publish.Messages {
		wanted, err := strconv.Atoi(message.Attributes[refusals])
		if err != nil {
			continue
		}
		identity := publish.Topic + "\x00" + message.OrderingKey + "\x00" + string(message.Data)
		if r.seen[identity] < wanted {
			if len(publish.Messages) == 1 {
				r.seen[identity]++ // as part of a larger request it was not refused by itself
			}
			return true, nil, status.Error(codes.InvalidArgument, "a message asked to be refused")
		}
	}
	return false, nil, nil
}

func main() {
	host := flag.String("host", "localhost", "address to listen on")
	port := flag.Int("port", 8085, "port to listen on")
	flag.Parse()

	server := pstest.NewServerWithAddress(net.JoinHostPort(*host, strconv.Itoa(*port)), pstest.ServerReactorOption{
		FuncName: "Publish",
		Reactor:  &refuser{seen: map[string]int{}},
	})
	fmt.Println("listening on", server.Addr)

	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	if err := server.Close(); err != nil {
		fmt.Fprintln(os.Stderr, "pstest did not close cleanly:", err)
	}
}
