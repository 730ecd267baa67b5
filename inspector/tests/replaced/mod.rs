//! A program of a test's own in the place of Cilium's.

use inspector_lab::Ns;

use crate::{
    bpf::{self, Map, TCX_INGRESS},
    node::Node,
};

/// Puts a program of the test's own in the place of Cilium's on eno1: named, pinned and with the
/// services map as Cilium's is.
pub fn in_place_of_cilium(
    node: &Node,
    code: impl FnOnce(&Map) -> bpf::Program + Send,
) -> bpf::Link {
    let path = node.link("devices/eno1/links/cil_from_netdev");
    node.detach("devices/eno1/links/cil_from_netdev");
    let eno1 = node.index("eno1");
    let services = Map::by_id(node.0.map("cilium_lb4_services_v2").expect("services").id());
    let attach = || {
        let program = code(&services);
        program.tcx(eno1, TCX_INGRESS, true)
    };
    let link = node.0.run_in(Ns::Node, attach).expect("the node");
    link.pin(&path);
    link
}
