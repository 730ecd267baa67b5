#!/run/vm/busybox sh
# Goes on where init.sh ends, as the same process: makes the surroundings of an ordinary system,
# runs the jobs one after the other, says how they ended and turns the machine off.
/run/vm/busybox --install -s /run/vm/bin
PATH=/run/vm/bin
. /run/vm/vm.conf # modules, modules_libraries, modprobe
release=$(uname -r)

mkdir -p /dev/pts /dev/shm
mount -t devpts -o ptmxmode=666,mode=620 devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for link in fd: stdin:/0 stdout:/1 stderr:/2; do
    ln -sf "/proc/self/fd${link#*:}" "/dev/${link%%:*}"
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf -o mode=700 bpf /sys/fs/bpf
mount -t securityfs securityfs /sys/kernel/security
mount -t tracefs tracefs /sys/kernel/tracing
mount -t debugfs debugfs /sys/kernel/debug
mkdir -p /run/netns /run/lock
mkdir -p "/lib/modules/$release"
mount -o bind "$modules" "/lib/modules/$release"
# Devices whose module is loaded when they are opened, /dev/net/tun among them.
while read -r _ name device; do
    case $device in [bc]*) ;; *) continue ;; esac
    numbers=${device#?}
    case $name in */*) mkdir -p "/dev/${name%/*}" ;; esac
    [ -e "/dev/$name" ] || mknod "/dev/$name" "${device%%[0-9]*}" "${numbers%:*}" "${numbers#*:}"
done <"/lib/modules/$release/modules.devname"
echo /run/vm/modprobe.sh >/proc/sys/kernel/modprobe
hostname vm
ip link set lo up

for port in /sys/class/virtio-ports/*; do
    case $(cat "$port/name") in
        output) output=/dev/${port##*/} ;;
        status) status=/dev/${port##*/} ;;
    esac
done
if [ -z "$output" ] || [ -z "$status" ]; then
    echo "vm: the serial ports of the host are not there" >/dev/console
    sleep 1
    echo o >/proc/sysrq-trigger
    sleep 60
fi
exec 3>"$status" </dev/null >"$output" 2>&1
echo "up $release" >&3
for job in /run/vm/share/job-*; do
    # 0 is standard input, output goes where ours goes; the status port is ours alone.
    sh "$job" 3>&-
    echo "ended ${job##*job-} $?" >&3
done
sync
echo "done" >&3
# Not with the commands of the host, which ask its init.
echo o >/proc/sysrq-trigger
sleep 60
