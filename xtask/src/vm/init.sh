#!/bin/busybox sh
# The first program of a virtual machine: loads what reaches the host's files, lays a file system in
# memory over them, and goes on there. A sentence on the console that begins with "vm: " is an error.
# First this: busybox finds its own path there.
/bin/busybox mount -t proc proc /proc
/bin/busybox --install -s /bin
export PATH=/bin
fail() {
    echo "vm: $*" >/dev/console
    sleep 1
    echo o >/proc/sysrq-trigger
    sleep 60
}
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /boot/*; do
    # Where the kernel has all of it built in, the name stays what it is.
    [ -e "$module" ] || continue
    insmod "$module" || fail "the module $module cannot be loaded"
done
share=trans=virtio,version=9p2000.L,msize=512000
mkdir -p /host /over /new
mount -t 9p -o "$share,cache=loose,ro" root /host || fail "the host's files cannot be mounted"
mount -t tmpfs -o size=75% tmpfs /over
mkdir /over/upper /over/work
mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work overlay /new ||
    fail "no file system in memory can be laid over the host's files"
mount -t tmpfs -o mode=755 tmpfs /new/run
mkdir -p /new/run/vm/bin /new/run/vm/share
mount -t 9p -o "$share,cache=none" share /new/run/vm/share || fail "the share cannot be mounted"
cp /bin/busybox /start.sh /modprobe.sh /vm.conf /new/run/vm/
# What the share holds in these folders is the host's.
for folder in proc sys dev; do
    mount -o move "/$folder" "/new/$folder" || fail "/$folder cannot be moved"
done
exec switch_root /new /run/vm/start.sh
