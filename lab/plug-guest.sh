#!/bin/sh
# The guest of lab/plug: says which functions come and go, and uses each disk that comes.
slot=/sys/bus/pci/devices/0000:00:04.0
until_true() { until "$@" 2>/dev/null; do usleep 20000; done; }
gone() { ! [ -e "$slot" ]; }
read_disk() { dd if=/dev/nvme0n1 bs=4k count=16 of=/dev/null 2>/dev/null; }

for round in 1 2; do
    echo "guest: waits $round"
    until_true [ -e "$slot/resource0" ]
    until_true read_disk
    echo "guest: has $round $(cat "$slot/class")"
    until_true gone
    until_true eval '! [ -e /dev/nvme0n1 ]'
    echo "guest: lost $round"
done
