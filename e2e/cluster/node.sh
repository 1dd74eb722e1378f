#!/bin/bash
# Process 1 of a cluster's namespaces: node.sh RUN NODE_ADDRESS SERVICES
#
# Sets up mounts and network, starts the commands in RUN/control-plane and then in RUN/node, restarts each that ends,
# and reaps orphans. When it ends, the kernel kills all processes of the namespaces and removes their mounts, interfaces
# and firewall rules.
set -eu
run=$1 node=$2 services=$3

# The node has no route to a proxy, and some programs would use it for addresses of the cluster.
unset {http,https,all,no}_proxy {HTTP,HTTPS,ALL,NO}_PROXY

# Programs use their default paths, and none of these files appears on the machine.
mount --make-rshared /
mount -t tmpfs -o size=8g tmpfs /var/lib
mount -t tmpfs tmpfs /run
mount --bind "$run/var-log" /var/log
mkdir -p /run/netns /run/lock

# kubelet sets these for the whole machine. Bind mounts with the desired values keep it from doing so.
(cd "$run/sysctl" && find . -type f) | while read -r file; do
  [ ! -e "/proc/sys/$file" ] || mount --bind "$run/sysctl/$file" "/proc/sys/$file"
done

read -r _ <"$run/go" # eth0 exists
ip link set lo up
ip address add "$node/30" dev eth0
ip link set eth0 up
# iptables rewrites the address of a service only in packets that have a route. No packet leaves by this one.
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
read -r _ <"$run/go" # the API server answers; some programs exit if it does not
for file in "$run"/node/*; do keep_running "$file" & done

trap 'exit 0' TERM INT
while :; do
  sleep infinity &
  wait $! || :
done
