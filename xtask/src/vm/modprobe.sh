#!/run/vm/busybox sh
# What the kernel calls for a module: kmod with its own libraries.
. /run/vm/vm.conf
export LD_LIBRARY_PATH="$modules_libraries"
exec "$modprobe" "$@"
