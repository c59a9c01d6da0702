#!/bin/sh
# Runs a command while the network that its container shares with the service is there, and ends with it.
# After a crash the service's container has another network, which a container joins only when it starts again.
set -u
asked='' child=''
trap 'asked=yes; [ -z "$child" ] || kill -TERM "$child"' TERM INT
"$@" &
child=$!
[ -z "$asked" ] || kill -TERM "$child"
while kill -0 "$child" 2> /dev/null; do
    if ! grep -q 'eth0:' /proc/net/dev; then
        echo "the service's container has ended, and its network with it; this one ends, to be started again" >&2
        sleep "${PAUSE_S:-10}" # the service's container must run again by then
        kill -KILL "$child"
        exit 75
    fi
    sleep 2 &
    wait $!
done
wait "$child"
