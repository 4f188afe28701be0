#!/usr/bin/env bash
# DPDK's testpmd forwards frames in a guest, with DPDK's own driver of the 82540EM on uio_pci_generic: each frame that the host
# sends comes back with its MAC addresses swapped and nothing else changed. Link changes reach testpmd as interrupts. The
# kernel's driver takes the interface back. Needs a guest kernel with uio_pci_generic (`deploy/setup/setup.sh e1000`), and is a
# part of `make soak`.
# shellcheck source=tests/e2e/lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=tests/e2e/e1000.sh
. "$here/e1000.sh"
only_in_soak "it makes an image with all of DPDK, whose driver polls all the time"
own_image dpdk dpdk-dev librte-net-e1000-23 librte-mempool-ring23 kmod iproute2 iputils-ping
modules=$(readlink -e "$kernel")/modules/kernel/drivers/uio
[ -f "$modules/uio_pci_generic.ko" ] || skip "uio_pci_generic of the guest's kernel (deploy/setup/setup.sh e1000)"
need_e1000_guests "$@"

boot e1000 1 --memory 512M --copy "$modules/uio.ko:/uio/uio.ko" --copy "$modules/uio_pci_generic.ko:/uio/uio_pci_generic.ko"
interface=$(ip -o addr show to "$gateway" | awk '{ print $2 }')
address=$(guest 'ip -4 -o addr show dev eth0' | awk '{ print $4 }')
slot=$(guest 'basename "$(readlink /sys/class/net/eth0/device)"')

# give DRIVER: takes the function from the driver that has it, and gives it to this one of the guest's kernel.
give() {
    guest "cd /sys/bus/pci/devices/$slot && echo $slot >driver/unbind && echo $1 >driver_override &&
        echo $slot >/sys/bus/pci/drivers_probe && basename \"\$(readlink driver)\"" >"$work/give" && [ "$(cat "$work/give")" = "$1" ]
}
# The driver refuses a function whose Interrupt Disable bit cannot be set and cleared.
guest "insmod /uio/uio.ko && insmod /uio/uio_pci_generic.ko" >"$work/give" && give uio_pci_generic ||
    fail "uio_pci_generic does not take the interface: $(cat "$work/give"; guest dmesg | tail -3)"
ok "uio_pci_generic takes the interface: its pin can be masked by Interrupt Disable"

guest 'mknod /dev/uio0 c $(tr : " " </sys/class/uio/uio0/dev) && echo 64 >/proc/sys/vm/nr_hugepages &&
    mkdir -p /dev/hugepages && mount -t hugetlbfs none /dev/hugepages' >"$work/prepare" || fail "preparing: $(cat "$work/prepare")"
mkfifo "$work/commands"
exec 3<>"$work/commands"
# Both threads of testpmd share the guest's CPU. Without stdbuf testpmd would write to a pipe only when its buffer is full.
"$slipway" exec --interactive nic stdbuf -oL dpdk-testpmd --lcores 0@0,1@0 --allow "$slot" -d librte_net_e1000.so -- \
    --interactive --total-num-mbufs=4096 --nb-cores=1 --forward-mode=macswap <"$work/commands" >"$work/testpmd" 2>&1 & testpmd=$!
started+=("$testpmd")

tell() { echo "$*" >&3; }
# soon PATTERN COMMAND…: runs the command, and waits until testpmd has printed one more line that matches the pattern.
soon() {
    local pattern=$1 before
    before=$(grep -cE "$pattern" "$work/testpmd")
    "${@:2}" >/dev/null || fail "${*:2}"
    wait_until 300 printed "$pattern" $((before + 1)) || fail "testpmd does not say $pattern: $(tail "$work/testpmd")"
}
# printed PATTERN COUNT: whether testpmd has printed so many lines that match.
printed() {
    runs "$testpmd" || fail "testpmd has ended: $(tail "$work/testpmd")"
    [ "$(grep -cE "$1" "$work/testpmd")" -ge "$2" ]
}
# link SETTING STATE: changes the link by the setting of the port. Testpmd reports the interrupt, and then has this state.
link() {
    soon "link state change event" "$slipway" port set nic --link "$1"
    soon "Link status: $2" tell show port info 0
}
# forwards COUNT: has testpmd forward frames until so many of them have come back and were compared. It must have received as
# many in all as it has sent.
forwards() {
    soon "macswap packet forwarding packets/burst" tell start
    timeout 600 python3 "$peer" swapped "$interface" "$mac" "$1" >"$work/swapped" 2>&1 ||
        fail "frames: $(tail -1 "$work/swapped"): $("$slipway" port stats default)"
    soon "Accumulated forward statistics" tell stop
    grep -A 2 "Forward statistics for port 0" "$work/testpmd" | tail -2 | tr -s ' \n' ' ' >"$work/statistics"
    read -r _ received _ missed _ _ _ sent _ dropped _ <"$work/statistics"
    [ "$received" -ge "$1" ] && [ "$received" = "$sent" ] && [ "$missed$dropped" = 00 ] ||
        fail "testpmd forwards other frames than it receives: $(cat "$work/statistics")"
}

# The spoof check drops frames of other protocols than it knows.
"$slipway" port set nic --spoof-check off >/dev/null || fail "port set"
forwards 3000
grep -q "Probe PCI driver: net_e1000_em (8086:100e)" "$work/testpmd" || fail "another driver: $(cat "$work/testpmd")"
ok "testpmd forwards frames of 60 to 1514 bytes as they came: $(cat "$work/statistics")"
link off down
link on up
link off down
link auto up
ok "each change of the link is an interrupt, and the next one comes too"
tell port stop 0
tell port start 0
forwards 1000
ok "it forwards again when the interface was stopped and started"
tell quit
wait "$testpmd" || fail "testpmd ends with status $?: $(tail "$work/testpmd")"
give e1000 || fail "the kernel's driver does not take the interface: $(cat "$work/give")"
guest "ip link set eth0 up && ip addr add $address dev eth0 && ping -c 3 -w 60 $gateway" >"$work/back" ||
    fail "no answer: $(cat "$work/back")"
no_complaints
ok "the kernel's driver takes the interface back"
