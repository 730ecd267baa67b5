//! Where things stand in the running kernel's structures, from its BTF.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use inspector_common::observe::Offsets;

use crate::sys::btf::Btf;

const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// What the tracing tiers know of the running kernel.
#[derive(Debug)]
pub(super) struct Kernel {
    pub(super) offsets: Offsets,
    /// Why packets and neighbours cannot be read, or IPv4's and IPv6's routes; none if they can.
    pub(super) base: Option<String>,
    pub(super) fib4: Option<String>,
    pub(super) fib6: Option<String>,
    /// Names of the reasons of drops.
    pub(super) reasons: BTreeMap<u32, String>,
    /// Whether the tracepoint of TCP resets tells those that answer for a port at which no socket
    /// listens, too. It does since Linux 6.10, which has given them reasons shortly before
    /// (`enum sk_rst_reason` in
    /// <https://github.com/torvalds/linux/blob/v6.10/include/net/rstreason.h>).
    pub(super) tells_all_resets: bool,
}

/// Of the running kernel, read once: it does not change.
pub(super) fn kernel() -> &'static Kernel {
    static KERNEL: OnceLock<Kernel> = OnceLock::new();
    KERNEL.get_or_init(Kernel::read)
}

impl Kernel {
    fn read() -> Self {
        match std::fs::read(Path::new(VMLINUX)) {
            Ok(bytes) => match Btf::new(&bytes) {
                Some(btf) => Self::of(&btf),
                None => Self::unknown(format!("{VMLINUX} holds no BTF that this version knows")),
            },
            Err(error) => Self::unknown(format!(
                "{VMLINUX}: {error}; the kernel has to be built with CONFIG_DEBUG_INFO_BTF"
            )),
        }
    }

    fn unknown(why: String) -> Self {
        Self {
            offsets: Offsets::default(),
            base: Some(why.clone()),
            fib4: Some(why.clone()),
            fib6: Some(why),
            reasons: BTreeMap::new(),
            tells_all_resets: false,
        }
    }

    fn of(btf: &Btf<'_>) -> Self {
        let names = [
            "sk_buff",
            "net_device",
            "net",
            "dst_entry",
            "sock",
            "proto",
            "neighbour",
            "neigh_table",
            "flowi4",
            "flowi6",
            "fib_nh_common",
            "fib6_result",
            "fib6_nh",
        ];
        let ids = btf.structures(names);
        let mut offsets = Offsets::default();
        let resolve = |members: &mut [(&mut u32, &str, &str)]| {
            for (to, structure, path) in members {
                let id = names.iter().position(|name| name == structure).and_then(|at| ids[at]);
                match id.and_then(|id| btf.offset(id, path)) {
                    Some(offset) => **to = offset,
                    None => {
                        return Some(format!("this kernel's BTF has no member {structure}.{path}"));
                    }
                }
            }
            None
        };
        let o = &mut offsets;
        let base = resolve(&mut [
            (&mut o.skb_len, "sk_buff", "len"),
            (&mut o.skb_protocol, "sk_buff", "protocol"),
            (&mut o.skb_mark, "sk_buff", "mark"),
            (&mut o.skb_head, "sk_buff", "head"),
            (&mut o.skb_data, "sk_buff", "data"),
            (&mut o.skb_tail, "sk_buff", "tail"),
            (&mut o.skb_network_header, "sk_buff", "network_header"),
            (&mut o.skb_dev, "sk_buff", "dev"),
            (&mut o.skb_refdst, "sk_buff", "_skb_refdst"),
            (&mut o.skb_sk, "sk_buff", "sk"),
            (&mut o.dst_dev, "dst_entry", "dev"),
            (&mut o.sk_net, "sock", "__sk_common.skc_net.net"),
            (&mut o.sk_prot, "sock", "__sk_common.skc_prot"),
            (&mut o.proto_name, "proto", "name"),
            (&mut o.dev_ifindex, "net_device", "ifindex"),
            (&mut o.dev_net, "net_device", "nd_net.net"),
            (&mut o.net_inum, "net", "ns.inum"),
            (&mut o.neigh_dev, "neighbour", "dev"),
            (&mut o.neigh_state, "neighbour", "nud_state"),
            (&mut o.neigh_table, "neighbour", "tbl"),
            (&mut o.neigh_key, "neighbour", "primary_key"),
            (&mut o.table_key_len, "neigh_table", "key_len"),
            (&mut o.hop_dev, "fib_nh_common", "nhc_dev"),
            (&mut o.hop_gateway_family, "fib_nh_common", "nhc_gw_family"),
            (&mut o.hop_gateway, "fib_nh_common", "nhc_gw"),
        ]);
        let fib4 = resolve(&mut [
            (&mut o.flow4_source, "flowi4", "saddr"),
            (&mut o.flow4_destination, "flowi4", "daddr"),
            (&mut o.flow4_protocol, "flowi4", "__fl_common.flowic_proto"),
            (&mut o.flow4_mark, "flowi4", "__fl_common.flowic_mark"),
        ]);
        let fib6 = resolve(&mut [
            (&mut o.flow6_source, "flowi6", "saddr"),
            (&mut o.flow6_destination, "flowi6", "daddr"),
            (&mut o.flow6_protocol, "flowi6", "__fl_common.flowic_proto"),
            (&mut o.flow6_mark, "flowi6", "__fl_common.flowic_mark"),
            (&mut o.result6_hop, "fib6_result", "nh"),
            (&mut o.result6_flags, "fib6_result", "fib6_flags"),
            (&mut o.hop6_common, "fib6_nh", "nh_common"),
        ]);
        let reasons = btf
            .enumeration("skb_drop_reason")
            .into_iter()
            .map(|(value, name)| {
                (value, name.strip_prefix("SKB_DROP_REASON_").unwrap_or(name).to_owned())
            })
            .collect();
        let tells_all_resets = !btf.enumeration("sk_rst_reason").is_empty();
        Self {
            fib4: base.clone().or(fib4),
            fib6: base.clone().or(fib6),
            base,
            offsets,
            reasons,
            tells_all_resets,
        }
    }
}
