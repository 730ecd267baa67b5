//! What the kernel says is attached: programs on devices and cgroups, and which maps they reach.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Name of the source of [`Attachments::hooks`].
pub const DEVICES: &str = "programs per device";
/// Name of the source of [`Attachments::cgroup`].
pub const CGROUPS: &str = "socket programs per cgroup";
/// Name of the source of [`Attachments::links`].
pub const LINKS: &str = "pinned links";
/// Name of the source of [`Attachments::programs`].
pub const DETAILS: &str = "what programs use";

/// Everything about attached programs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Attachments {
    /// Programs on network devices, in the order in which a packet meets them on each hook.
    pub hooks: Vec<DeviceHook>,
    /// Programs of the socket hooks that are in force for a cgroup.
    pub cgroup: Vec<CgroupHook>,
    /// Links that Cilium pinned below `<bpffs>/cilium`.
    pub links: Vec<PinnedLink>,
    /// Every program that is attached, and every program that those can tail-call; sorted by id.
    pub programs: Vec<Program>,
    /// Every network device, with programs or without.
    #[serde(default)]
    pub devices: Vec<DeviceName>,
    /// clsact filters that run no BPF program, but can end the chain.
    #[serde(default)]
    pub other_filters: Vec<OtherFilter>,
    /// The cgroups that were asked for their socket hooks, those without programs included.
    #[serde(default)]
    pub cgroups: Vec<CgroupAsked>,
    /// The maps that the programs use; sorted by id.
    #[serde(default)]
    pub maps: Vec<UsedMap>,
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceName {
    /// Interface index.
    pub ifindex: u32,
    /// Name.
    pub name: String,
}

/// A clsact filter that is no BPF program: `flower`, `u32`, ….
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OtherFilter {
    /// Interface index.
    pub ifindex: u32,
    /// The hook: clsact at ingress or egress.
    pub kind: HookKind,
    /// Kind of filter: `flower`, `u32`, `matchall`, `bpf` for classic BPF, ….
    pub filter: String,
    /// Priority; lower ones come first.
    pub priority: u16,
    /// Handle.
    pub handle: u32,
    /// Chain; only chain 0 is met without a `goto`.
    pub chain: u32,
}

/// A cgroup that was asked for the programs in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CgroupAsked {
    /// Whose cgroup: `root`, `self` or `pid N`.
    pub subject: String,
    /// Path of the cgroup below the cgroup2 mount, where it was found.
    pub cgroup: Option<String>,
    /// Why it could not be asked.
    pub problem: Option<String>,
}

/// A map that a program uses. Sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct UsedMap {
    /// Map id.
    pub id: u32,
    /// Name, cut by the kernel to 15 bytes.
    pub name: String,
    /// Map type, the kernel's number.
    pub map_type: u32,
    /// Key size.
    pub key_size: u32,
    /// Value size.
    pub value_size: u32,
}

/// A kind of hook on a network device.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum HookKind {
    /// XDP in the driver.
    XdpNative,
    /// XDP in the stack.
    XdpGeneric,
    /// XDP in the hardware.
    XdpOffload,
    /// tcx at ingress.
    TcxIngress,
    /// A clsact filter at ingress.
    ClsactIngress,
    /// netkit, primary device.
    NetkitPrimary,
    /// netkit, peer device.
    NetkitPeer,
    /// tcx at egress.
    TcxEgress,
    /// A clsact filter at egress.
    ClsactEgress,
}

impl HookKind {
    /// Whether it is XDP, wherever that runs.
    #[must_use]
    pub fn is_xdp(self) -> bool {
        matches!(self, Self::XdpNative | Self::XdpGeneric | Self::XdpOffload)
    }
}

/// One program on one hook of one device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DeviceHook {
    /// Interface index.
    pub ifindex: u32,
    /// The hook.
    pub kind: HookKind,
    /// Place in the chain of this hook, from 0.
    pub order: u32,
    /// Program id.
    pub program: u32,
    /// Link id, where a link holds it.
    pub link: Option<u32>,
    /// clsact: name of the filter, priority, handle and whether it is direct-action.
    pub filter: Option<Filter>,
}

/// A clsact filter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Filter {
    /// Name (`TCA_BPF_NAME`), where it has one.
    pub name: Option<String>,
    /// Priority; lower ones come first.
    pub priority: u16,
    /// Handle.
    pub handle: u32,
    /// Whether its return value is the verdict.
    pub direct_action: bool,
    /// Ethertype that it is for; 3 (`ETH_P_ALL`) is every one.
    #[serde(default = "every_protocol")]
    pub protocol: u16,
    /// Chain; only chain 0 is met without a `goto`.
    #[serde(default)]
    pub chain: u32,
    /// The block that it is in, if several devices share it.
    #[serde(default)]
    pub block: Option<u32>,
}

/// `ETH_P_ALL`
fn every_protocol() -> u16 {
    3
}

/// One program on one socket hook of a cgroup.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CgroupHook {
    /// Whose cgroup was asked: `root`, `self` or `pid N`.
    pub subject: String,
    /// Path of that cgroup below the cgroup2 mount.
    pub cgroup: String,
    /// Attach type: `connect4`, `sendmsg6`, ….
    pub attach_type: String,
    /// Place in the order of execution, from 0.
    pub order: u32,
    /// Program id.
    pub program: u32,
}

/// A pinned link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinnedLink {
    /// Path of the pin.
    pub path: String,
    /// Link id.
    pub id: u32,
    /// Program id.
    pub program: u32,
    /// Kind of link: `tcx`, `xdp`, `cgroup`, `netkit` or the kernel's number.
    pub kind: String,
    /// tcx, XDP, netkit: interface index; 0 if the device is gone.
    pub ifindex: Option<u32>,
    /// cgroup: id of the cgroup; 0 if it is gone.
    pub cgroup_id: Option<u64>,
    /// Attach type, the kernel's number, where the link has one.
    pub attach_type: Option<u32>,
    /// Whether the link holds nothing any more: its device or cgroup is gone.
    pub defunct: bool,
    /// cgroup: its path below the cgroup2 mount, where it could be found.
    #[serde(default)]
    pub cgroup: Option<String>,
    /// Device: whether the kernel's answer for the hook that the link names shows its program, in
    /// this network namespace; nothing where the hook could not be asked.
    #[serde(default)]
    pub shown: Option<bool>,
}

/// A loaded program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Program {
    /// Program id.
    pub id: u32,
    /// Full name from BTF, else the kernel's of 15 bytes.
    pub name: String,
    /// Whether the name is cut.
    pub name_cut: bool,
    /// Program type, the kernel's number.
    pub program_type: u32,
    /// Tag, hexadecimal digits.
    pub tag: String,
    /// When it was loaded, nanoseconds since boot.
    pub loaded_ns: u64,
    /// Number of runs, where the kernel counts them.
    pub run_count: Option<u64>,
    /// Nanoseconds that all runs took, where the kernel counts them.
    #[serde(default)]
    pub run_time_ns: Option<u64>,
    /// Ids of the maps that it uses itself.
    pub maps: Vec<u32>,
    /// Ids of the programs in the program arrays that it uses, those of network policy left out:
    /// they lead to any endpoint's programs, after services were looked up.
    pub tail_calls: Vec<u32>,
    /// Values of the read-only data that has BTF, by name: `eth_header_length`, ….
    #[serde(default)]
    pub constants: std::collections::BTreeMap<String, u64>,
}

impl Attachments {
    /// The program with this id.
    #[must_use]
    pub fn program(&self, id: u32) -> Option<&Program> {
        let index = self.programs.binary_search_by_key(&id, |program| program.id).ok()?;
        self.programs.get(index)
    }

    /// Name of the device with this index.
    #[must_use]
    pub fn device_name(&self, ifindex: u32) -> Option<&str> {
        self.devices.iter().find(|one| one.ifindex == ifindex).map(|one| one.name.as_str())
    }
}
