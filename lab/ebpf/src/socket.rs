//! Socket load balancing: connections are translated before there is a packet.

use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::helpers::generated::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_set_retval};
use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr};
use aya_ebpf::programs::{SockAddrContext, SockContext};

use crate::config::{enable_l7_lb, host_netns_cookie, no_backend_errno, sock_hostns_only};
use crate::maps::{REVERSE_SK4, REVERSE_SK6, Reverse, ReverseKey};
use crate::packet;
use crate::service::{self, Client, L7, Target};

const ALLOW: i32 = 1;
const REFUSE: i32 = 0;

#[cgroup_sock_addr(connect4)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock4_connect(ctx: SockAddrContext) -> i32 {
    forward::<false>(ctx.sock_addr)
}

#[cgroup_sock_addr(connect6)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock6_connect(ctx: SockAddrContext) -> i32 {
    forward::<true>(ctx.sock_addr)
}

#[cgroup_sock_addr(sendmsg4)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock4_sendmsg(ctx: SockAddrContext) -> i32 {
    forward::<false>(ctx.sock_addr)
}

#[cgroup_sock_addr(sendmsg6)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock6_sendmsg(ctx: SockAddrContext) -> i32 {
    forward::<true>(ctx.sock_addr)
}

#[cgroup_sock_addr(recvmsg4)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock4_recvmsg(ctx: SockAddrContext) -> i32 {
    backward::<false>(ctx.sock_addr)
}

#[cgroup_sock_addr(recvmsg6)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock6_recvmsg(ctx: SockAddrContext) -> i32 {
    backward::<true>(ctx.sock_addr)
}

#[cgroup_sock_addr(getpeername4)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock4_getpeername(ctx: SockAddrContext) -> i32 {
    backward::<false>(ctx.sock_addr)
}

#[cgroup_sock_addr(getpeername6)]
#[expect(clippy::needless_pass_by_value, reason = "the signature that the macro asks for")]
pub fn cil_sock6_getpeername(ctx: SockAddrContext) -> i32 {
    backward::<true>(ctx.sock_addr)
}

/// A real one refuses ports of services; the lab needs its presence alone.
#[cgroup_sock(post_bind4)]
pub fn cil_sock4_post_bind(_: SockContext) -> i32 {
    ALLOW
}

/// As for IPv4.
#[cgroup_sock(post_bind6)]
pub fn cil_sock6_post_bind(_: SockContext) -> i32 {
    ALLOW
}

/// A real one forgets the socket; here the map does, being one of the recently used.
#[cgroup_sock(sock_release)]
pub fn cil_sock_release(_: SockContext) -> i32 {
    ALLOW
}

/// The address that the socket talks to.
#[inline(always)]
fn destination<const V6: bool>(ctx: *mut bpf_sock_addr) -> ([u32; 4], u16) {
    // SAFETY: the kernel hands a valid context to the program.
    let ctx = unsafe { &*ctx };
    #[expect(clippy::cast_possible_truncation, reason = "the low half is the port")]
    let port = ctx.user_port as u16;
    let address = if V6 {
        let [a, b, c, d] = &ctx.user_ip6;
        // SAFETY: as above; volatile, so that no two reads become one of a width that the kernel
        // refuses for a context.
        unsafe {
            [
                core::ptr::read_volatile(a),
                core::ptr::read_volatile(b),
                core::ptr::read_volatile(c),
                core::ptr::read_volatile(d),
            ]
        }
    } else {
        [ctx.user_ip4, 0, 0, 0]
    };
    (address, port)
}

#[inline(always)]
fn set<const V6: bool>(ctx: *mut bpf_sock_addr, target: &Target) {
    // SAFETY: as in `destination`.
    let ctx = unsafe { &mut *ctx };
    if V6 {
        for (to, from) in ctx.user_ip6.iter_mut().zip(target.address) {
            // SAFETY: as in `destination`.
            unsafe { core::ptr::write_volatile(to, from) };
        }
    } else {
        ctx.user_ip4 = target.address[0];
    }
    ctx.user_port = u32::from(target.port);
}

#[inline(always)]
fn is_loopback<const V6: bool>(address: &[u32; 4]) -> bool {
    if V6 {
        *address == [0, 0, 0, 1_u32.to_be()]
    } else {
        let [first, ..] = address[0].to_ne_bytes();
        first == 127
    }
}

#[inline(always)]
fn forward<const V6: bool>(ctx: *mut bpf_sock_addr) -> i32 {
    // SAFETY: the context is the one that this program was given.
    let (netns, protocol) = unsafe { (bpf_get_netns_cookie(ctx.cast()), (*ctx).protocol) };
    let on_host = netns == host_netns_cookie.load();
    if sock_hostns_only.load() != 0 && !on_host {
        return ALLOW;
    }
    let (vip, port) = destination::<V6>(ctx);
    #[expect(clippy::cast_possible_truncation, reason = "the protocols that matter are below 256")]
    let protocol = protocol as u8;
    let mut address = vip;
    let mut found = service::find::<V6>(&address, port, protocol, true);
    if found.is_none() && on_host {
        // Ports of the node itself stand in the map under no address.
        let own =
            is_loopback::<V6>(&vip) || packet::endpoint::<V6>(&vip).is_some_and(packet::is_node);
        if own {
            address = [0; 4];
            found = service::find::<V6>(&address, port, protocol, true);
        }
    }
    let Some(found) = found else { return ALLOW };
    if enable_l7_lb.load() != 0 && found.service.flags2 & L7 != 0 {
        if on_host {
            let here = if V6 {
                [0, 0, 0, 1_u32.to_be()]
            } else {
                [u32::from_ne_bytes([127, 0, 0, 1]), 0, 0, 0]
            };
            let port = service::proxy_port(&found.service);
            set::<V6>(ctx, &Target { id: 0, address: here, port });
        }
        return ALLOW;
    }
    if found.service.count == 0 {
        let errno = no_backend_errno.load();
        if errno != 0 {
            // SAFETY: the helper takes a plain number.
            unsafe { bpf_set_retval(-errno.cast_signed()) };
        }
        return REFUSE;
    }
    // No service may take over an address of someone else. A real one asks the IP cache whether it
    // is the node's own.
    if found.service.flags & service::EXTERNAL_IP != 0
        && !packet::endpoint::<V6>(&address).is_some_and(packet::is_node)
    {
        return ALLOW;
    }
    // SAFETY: the context is the one that this program was given.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.cast()) };
    #[expect(clippy::cast_possible_truncation, reason = "taken apart into halves")]
    let client = Client { id: [netns as u32, (netns >> 32) as u32, 0, 0], is_netns: true };
    // As in Cilium, Maglev is for packets.
    let Some(target) = service::choose::<V6>(&found, &address, port, &client, 0, None) else {
        // A real one lets the connection go to the VIP.
        return ALLOW;
    };
    let rev_nat = found.service.rev_nat;
    let noted = if V6 {
        let key = ReverseKey { cookie, address: target.address, port: target.port, pad: [0; 3] };
        REVERSE_SK6.insert(key, Reverse { address: vip, port, rev_nat }, 0)
    } else {
        let key = ReverseKey { cookie, address: target.address[0], port: target.port, pad: [0; 1] };
        REVERSE_SK4.insert(key, Reverse { address: vip[0], port, rev_nat }, 0)
    };
    if noted.is_ok() {
        set::<V6>(ctx, &target);
    }
    ALLOW
}

#[inline(always)]
fn backward<const V6: bool>(ctx: *mut bpf_sock_addr) -> i32 {
    // SAFETY: the context is the one that this program was given.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.cast()) };
    let (address, port) = destination::<V6>(ctx);
    let vip = if V6 {
        let key = ReverseKey { cookie, address, port, pad: [0; 3] };
        let Some(vip) = REVERSE_SK6.get_ptr(key) else { return ALLOW };
        // SAFETY: a found entry is valid while this program runs.
        let vip = unsafe { *vip };
        Target { id: 0, address: vip.address, port: vip.port }
    } else {
        let key = ReverseKey { cookie, address: address[0], port, pad: [0; 1] };
        let Some(vip) = REVERSE_SK4.get_ptr(key) else { return ALLOW };
        // SAFETY: as above.
        let vip = unsafe { *vip };
        Target { id: 0, address: [vip.address, 0, 0, 0], port: vip.port }
    };
    set::<V6>(ctx, &vip);
    ALLOW
}
