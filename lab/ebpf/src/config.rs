//! What differs between devices and captures: read-only data that the lab sets before it loads.

use aya_ebpf::Global;

/// Length of the Ethernet header on this device, bytes: 14, or 0 for a device without.
#[unsafe(no_mangle)]
pub static eth_header_length: Global<u32> = Global::new(14);

/// MAC address of this device: the first six bytes as they are on the wire.
#[unsafe(no_mangle)]
pub static interface_mac: Global<u64> = Global::new(0);

/// IPv4 address, network byte order, that connections to backends elsewhere have as their source.
#[unsafe(no_mangle)]
pub static nat_ipv4: Global<u32> = Global::new(0);

/// First half of the IPv6 address for the same, network byte order.
#[unsafe(no_mangle)]
pub static nat_ipv6_high: Global<u64> = Global::new(0);

/// Second half of it.
#[unsafe(no_mangle)]
pub static nat_ipv6_low: Global<u64> = Global::new(0);

/// Cookie of the node's network namespace.
#[unsafe(no_mangle)]
pub static host_netns_cookie: Global<u64> = Global::new(0);

/// 1 where L7 load balancing is compiled in: the flag in a service is heeded.
#[unsafe(no_mangle)]
pub static enable_l7_lb: Global<u32> = Global::new(0);

/// 1 where a client of a service without backends is told so with ICMP, 0 where it hears nothing.
#[unsafe(no_mangle)]
pub static enable_reject: Global<u32> = Global::new(0);

/// 1 where sockets of pods are not translated.
#[unsafe(no_mangle)]
pub static sock_hostns_only: Global<u32> = Global::new(0);

/// What connect(2) to a service without backends fails with; 0 for the kernel's own, `EPERM`.
#[unsafe(no_mangle)]
pub static no_backend_errno: Global<u32> = Global::new(0);

/// Security identities of clients outside of the cluster, IPv4 and IPv6.
#[unsafe(no_mangle)]
pub static world_ipv4: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static world_ipv6: Global<u32> = Global::new(0);

/// 1 where the key of a metric says file and line.
#[unsafe(no_mangle)]
pub static metrics_say_where: Global<u32> = Global::new(0);

/// Entries of a Maglev table, by IP version; 0 where there are none.
#[unsafe(no_mangle)]
pub static maglev4_size: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
pub static maglev6_size: Global<u32> = Global::new(0);
