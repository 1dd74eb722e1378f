#!/bin/bash
# Process 1 of a cluster's namespaces: node.sh RUN NODE_ADDRESS SERVICES
#
# It makes mounts and network of its own, starts what it finds in RUN/control-plane and then in RUN/node, starts again
# whatever ends, and buries what nobody else buries. Its end ends everything: the kernel kills all processes of the
# namespaces, and with them go mounts, interfaces, firewall rules.
set -eu
run=$1 node=$2 services=$3

# There is no way out, so there is no proxy either; some programs would ask it for the addresses of the cluster.
unset {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY

# All programs keep their usual paths, and none of them appears on the machine.
mount --make-rshared /
mount -t tmpfs -o size=8g tmpfs /var/lib
mount -t tmpfs tmpfs /run
mount --bind "$run/var-log" /var/log
mkdir -p /run/netns /run/lock

# kubelet sets these for the whole machine: it gets files that already say what it wants.
(cd "$run/sysctl" && find . -type f) | while read -r file; do
  [ ! -e "/proc/sys/$file" ] || mount --bind "$run/sysctl/$file" "/proc/sys/$file"
done

read -r _ <"$run/go" # the cable is plugged in
ip link set lo up
ip address add "$node/30" dev eth0
ip link set eth0 up
# The firewall rewrites a service's address only in what has a route; nothing leaves by this one.
ip route add "$services" dev lo src "$node"
echo 1 >/proc/sys/net/ipv4/ip_forward

keep_running() { # FILE: a shell command
  local name
  name=$(basename "$1")
  while :; do
    bash -c "echo \$\$ >'$run/pids/$name'; exec $(cat "$1")" >>"$run/log/$name.log" 2>&1 && status=0 || status=$?
    echo "$(date -Is) $name ended with status $status" >>"$run/log/ended.log"
    sleep 1
  done
}

for file in "$run"/control-plane/*; do keep_running "$file" & done
read -r _ <"$run/go" # the API server answers; some programs end themselves when it does not
for file in "$run"/node/*; do keep_running "$file" & done

trap 'exit 0' TERM INT
while :; do
  sleep infinity &
  wait $! || :
done
