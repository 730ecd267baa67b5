//! A real netkit pair with programs, as it is collected.
//!
//! netkit is of Linux 6.7 and not in every kernel, so that `cargo test` leaves this file out unless
//! it is named; `cargo xtask test` runs it in a virtual machine. Needs root.

mod bpf;
mod net;

use bpf::Code;
use inspector::{
    collect::{self, Options, Question},
    evidence::{
        Evidence, SourceStatus,
        programs::{Attachments, DETAILS, DEVICES, HookKind, LINKS},
    },
};
use inspector_lab::Lab;
use net::{Host, index, netlink};
use netlink_packet_route::link::NetkitMode;
use rtnetlink::LinkNetkit;

fn evidence(lab: &Lab) -> Evidence {
    let evidence = collect::node(&Options {
        bpffs: Some(lab.bpffs().to_owned()),
        ..Options::new(Question::Datapath)
    })
    .expect("the lab's bpffs can be read");
    for what in [DEVICES, DETAILS, LINKS] {
        let source = evidence.sources.iter().find(|source| source.what == what).expect(what);
        assert_eq!(source.status, SourceStatus::Complete, "{source:?}");
    }
    evidence
}

fn attachments(evidence: &Evidence) -> &Attachments {
    evidence.attachments.as_ref().expect("attached programs")
}

/// Device, hook, order, program and link of what is attached in this network namespace.
fn hooks(evidence: &Evidence) -> Vec<(u32, HookKind, u32, u32, Option<u32>)> {
    attachments(evidence)
        .hooks
        .iter()
        .map(|hook| (hook.ifindex, hook.kind, hook.order, hook.program, hook.link))
        .collect()
}

#[test]
fn programs_of_both_ends_of_a_pair_are_seen() {
    let lab = Lab::builder()
        .project("v1.18-tcx")
        .only(["cilium_lb4_services_v2", "cilium_lb6_services_v2"])
        .up()
        .expect("a lab");
    Host::new().run(|| {
        netlink(async |handle| {
            let pair = LinkNetkit::new("nk0", "nk0p", NetkitMode::L3).build();
            handle.link().add(pair).execute().await.unwrap_or_else(|error| {
                panic!("this test needs netkit in the kernel (Linux 6.7, CONFIG_NETKIT): {error}")
            });
        });
        let (primary, peer) = (index("nk0"), index("nk0p"));
        assert_eq!(hooks(&evidence(&lab)), []);

        let from = Code::tc("cil_from_container").load();
        let second = Code::tc("second").load();
        let to = Code::tc("cil_to_container").load();
        // Both ends are held by the primary device, as Cilium does it.
        let from_link = from.netkit(primary, true);
        let second_link = second.netkit(primary, true);
        let to_link = to.netkit(primary, false);
        let pin = lab.bpffs().join("cilium/endpoints/7/links/cil_from_container");
        from_link.pin(&pin);

        let seen = evidence(&lab);
        assert_eq!(
            hooks(&seen),
            [
                (primary, HookKind::NetkitPrimary, 0, to.id, Some(to_link.id)),
                (primary, HookKind::NetkitPeer, 0, from.id, Some(from_link.id)),
                (primary, HookKind::NetkitPeer, 1, second.id, Some(second_link.id)),
            ]
        );
        let names: Vec<_> = attachments(&seen).devices.iter().map(|device| &device.name).collect();
        assert!(names.contains(&&"nk0".to_owned()) && names.contains(&&"nk0p".to_owned()));
        let [link] = attachments(&seen).links.as_slice() else {
            panic!("{:?}", attachments(&seen).links);
        };
        assert_eq!(link.path, pin.to_str().expect("UTF-8"));
        assert_eq!(
            (link.kind.as_str(), link.ifindex, link.program, link.defunct, link.shown),
            // The link names the peer; what it holds is shown at the primary device.
            ("netkit", Some(peer), from.id, false, Some(true))
        );

        // Gone with their links; the pin holds its own.
        drop((second_link, to_link));
        assert_eq!(
            hooks(&evidence(&lab)),
            [(primary, HookKind::NetkitPeer, 0, from.id, Some(from_link.id))]
        );
    });
}
