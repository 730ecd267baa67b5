//! Attached programs on a real kernel: real programs on real devices and cgroups, in network
//! namespaces and cgroups that the test makes. Needs root.

mod bpf;
mod net;

use std::{
    collections::BTreeMap,
    fs,
    os::{fd::AsFd, unix::process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
};

use bpf::{Code, INET4_CONNECT, Link, Map, Program, TCX_EGRESS, TCX_INGRESS, UDP4_SENDMSG, clsact};
use inspector::{
    cilium::layout::Family,
    collect::{self, Options, Question, programs::CgroupSubject},
    evidence::{
        Evidence, SourceStatus,
        file::Document,
        programs::{Attachments, CGROUPS, DETAILS, DEVICES, DeviceHook, HookKind, LINKS},
    },
    judge::datapath::{self, Datapath, Holder, Reach},
    report::{datapath::Report, table::Style},
    trace::{
        observe::{Observers, Plan},
        sighting::Tier,
    },
};
use inspector_lab::Lab;
use net::{DEVICE, Host, index, node_and_client, tun};
use serde_json::Value;

/// A bpffs with Cilium's services maps in it, and nothing else.
fn lab() -> Lab {
    Lab::builder()
        .project("v1.18-tcx")
        .only(["cilium_lb4_services_v2", "cilium_lb6_services_v2"])
        .up()
        .expect("a lab")
}

fn services(lab: &Lab) -> Map {
    Map::by_id(lab.map("cilium_lb4_services_v2").expect("the services map").id())
}

fn evidence(lab: &Lab) -> Evidence {
    collect::node(&Options {
        bpffs: Some(lab.bpffs().to_owned()),
        ..Options::new(Question::Datapath)
    })
    .expect("the lab's bpffs can be read")
}

/// Collects and analyses; nothing may have been left out.
fn look(lab: &Lab) -> (Evidence, Datapath) {
    let evidence = evidence(lab);
    for what in [DEVICES, DETAILS, LINKS, CGROUPS] {
        let source = evidence.sources.iter().find(|source| source.what == what).expect(what);
        assert_eq!(source.status, SourceStatus::Complete, "{source:?}");
    }
    let datapath = datapath::datapath(&evidence).expect("attached programs");
    (evidence, datapath)
}

fn attachments(evidence: &Evidence) -> &Attachments {
    evidence.attachments.as_ref().expect("attached programs")
}

/// Hook, order and program of each hook of a device.
fn hooks(evidence: &Evidence, ifindex: u32) -> Vec<(HookKind, u32, u32)> {
    let of_device = |hook: &&DeviceHook| hook.ifindex == ifindex;
    attachments(evidence)
        .hooks
        .iter()
        .filter(of_device)
        .map(|hook| (hook.kind, hook.order, hook.program))
        .collect()
}

fn finding_ids(datapath: &Datapath) -> Vec<&'static str> {
    datapath.findings.iter().map(|finding| finding.id.as_str()).collect()
}

fn pin_path(lab: &Lab, device: &str, name: &str) -> PathBuf {
    lab.bpffs().join("cilium/devices").join(device).join("links").join(name)
}

#[test]
fn tcx_programs_are_seen_in_order_with_links_and_pins() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let _eno1 = tun("eno1");
        let eno1 = index("eno1");
        let from = Code::tc("cil_from_netdev").uses(&services).load();
        let link = from.tcx(eno1, TCX_INGRESS, false);
        link.pin(&pin_path(&lab, "eno1", "cil_from_netdev"));
        let to = Code::tc("cil_to_netdev").load();
        let to_link = to.tcx(eno1, TCX_EGRESS, false);

        let (seen, found) = look(&lab);
        assert_eq!(
            hooks(&seen, eno1),
            [(HookKind::TcxIngress, 0, from.id), (HookKind::TcxEgress, 0, to.id)]
        );
        let device = datapath::device(&seen, eno1).expect("the device");
        assert_eq!(device.name.as_deref(), Some("eno1"));
        let [ingress, egress] = device.programs.as_slice() else { panic!("{device:#?}") };
        assert!(ingress.is_cilium && egress.is_cilium);
        assert_eq!(
            ingress.holder,
            Holder::Pinned {
                link: link.id,
                path: pin_path(&lab, "eno1", "cil_from_netdev").display().to_string()
            }
        );
        assert_eq!(egress.holder, Holder::Unpinned { link: to_link.id });
        assert_eq!(device.services(Family::V4), Some(Reach::Itself));
        assert_eq!(device.services(Family::V6), Some(Reach::No));
        assert_eq!(finding_ids(&found), [""; 0]);
        let pins = &attachments(&seen).links;
        assert_eq!(pins.len(), 1);
        assert_eq!((pins[0].shown, pins[0].defunct), (Some(true), false));
        // Loopback has nothing, and is there.
        assert_eq!(hooks(&seen, 1), []);
        assert_eq!(attachments(&seen).device_name(1), Some("lo"));

        // A foreign program in front.
        let foreign = Code::tc("shaper").load();
        let _foreign_link = foreign.tcx(eno1, TCX_INGRESS, true);
        let (seen, found) = look(&lab);
        assert_eq!(
            hooks(&seen, eno1)[..2],
            [(HookKind::TcxIngress, 0, foreign.id), (HookKind::TcxIngress, 1, from.id)]
        );
        assert_eq!(finding_ids(&found), ["attach-shadowed"]);
        assert!(found.findings[0].seen.contains("shaper"), "{:?}", found.findings);
        let device = datapath::device(&seen, eno1).expect("the device");
        assert_eq!(device.shadowed_by().map(|shadow| shadow.shadowed), Some(from.id));

        // The same Cilium program twice: an older load of it behind.
        let old = Code::tc("cil_from_netdev").load();
        let _old_link = old.tcx(eno1, TCX_INGRESS, false);
        let (_, found) = look(&lab);
        assert_eq!(finding_ids(&found), ["attach-duplicate", "attach-shadowed"]);
        assert!(found.findings[0].seen.contains("2 times"), "{:?}", found.findings);
    });
}

#[test]
fn a_foreign_program_behind_is_no_shadow_and_our_observer_is_none_either() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let _eno1 = tun("eno1");
        let eno1 = index("eno1");
        let from = Code::tc("cil_from_netdev").uses(&services).load();
        let _link = from.tcx(eno1, TCX_INGRESS, false);
        let _behind = Code::tc("shaper").load().tcx(eno1, TCX_INGRESS, false);
        let plan =
            Plan { ingress: vec!["eno1".to_owned()], tiers: [Tier::Tc].into(), ..Plan::default() };
        let observers = Observers::start(&plan).expect("the observers");
        assert_eq!(observers.status()[0].attached, ["eno1 ingress (tcx)"]);
        let (seen, found) = look(&lab);
        assert_eq!(hooks(&seen, eno1).len(), 3);
        assert_eq!(finding_ids(&found), [""; 0]);
        let device = datapath::device(&seen, eno1).expect("the device");
        assert_eq!(device.shadows.len(), 1, "{:?}", device.shadows);
        assert!(device.shadowed_by().is_none());
    });
}

#[test]
fn clsact_filters_of_all_generations_are_seen() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let (_eno1, _wg0, _old) = (tun("eno1"), tun("wg0"), tun("old0"));
        let (eno1, wg0, old) = (index("eno1"), index("wg0"), index("old0"));
        for device in [eno1, wg0, old] {
            clsact(device);
        }
        let from = Code::tc("cil_from_netdev").uses(&services).load();
        from.filter(eno1, false, "cil_from_netdev-eno1", 1);
        let to = Code::tc("cil_to_netdev").load();
        to.filter(eno1, true, "cil_to_netdev-eno1", 1);
        // 1.13 named its filters after the device alone.
        let from_13 = Code::tc("cil_from_netdev").uses(&services).load();
        from_13.filter(wg0, false, "cilium-wg0", 1);
        // 1.10 to 1.12 by iproute2, programs without names of Cilium's.
        let from_12 = Code::tc("from_netdev").uses(&services).load();
        from_12.filter(old, false, "bpf_netdev_old0.o:[from-netdev]", 1);

        let (seen, found) = look(&lab);
        assert_eq!(
            hooks(&seen, eno1),
            [(HookKind::ClsactIngress, 0, from.id), (HookKind::ClsactEgress, 0, to.id)]
        );
        let filter = attachments(&seen).hooks[0].filter.as_ref().expect("a filter");
        assert_eq!(filter.name.as_deref(), Some("cil_from_netdev-eno1"));
        assert_eq!((filter.priority, filter.handle, filter.protocol), (1, 1, 3));
        assert!(filter.direct_action);
        for ifindex in [eno1, wg0, old] {
            let device = datapath::device(&seen, ifindex).expect("the device");
            assert_eq!(device.services(Family::V4), Some(Reach::Itself), "{device:#?}");
            assert_eq!(device.programs[0].holder, Holder::Hook);
        }
        assert_eq!(finding_ids(&found), [""; 0]);

        // Something in front, that is no BPF; and a foreign program behind.
        bpf::classic(wg0, 0x10);
        from_13.filter(wg0, false, "cilium-wg0", 0x20);
        let (seen, found) = look(&lab);
        assert_eq!(hooks(&seen, wg0).len(), 2);
        assert_eq!(finding_ids(&found), ["attach-duplicate", "attach-shadowed"]);
        assert!(found.findings[1].seen.contains("bpf filter of priority 16"));
    });
}

#[test]
fn xdp_in_the_stack_and_in_the_driver_are_told_apart() {
    let lab = lab();
    let services = services(&lab);
    let (node, client) = node_and_client();
    let generic = Code::xdp("cil_xdp_entry").uses(&services).load();
    client.run(|| {
        let device = index(net::CLIENT_DEVICE);
        let _link = generic.xdp(device, true);
        let (seen, _) = look(&lab);
        assert_eq!(hooks(&seen, device), [(HookKind::XdpGeneric, 0, generic.id)]);
    });
    node.run(|| {
        let device = index(DEVICE);
        let native = Code::xdp("cil_xdp_entry").uses(&services).load();
        let link = native.xdp(device, false);
        link.pin(&pin_path(&lab, DEVICE, "cil_xdp_entry"));
        let (seen, found) = look(&lab);
        assert_eq!(hooks(&seen, device), [(HookKind::XdpNative, 0, native.id)]);
        let analysed = datapath::device(&seen, device).expect("the device");
        assert!(matches!(analysed.programs[0].holder, Holder::Pinned { .. }), "{analysed:#?}");
        assert_eq!(analysed.services(Family::V4), Some(Reach::Itself));
        assert_eq!(finding_ids(&found), [""; 0]);
    });
}

#[test]
fn what_a_program_reaches_is_told() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let _devices: Vec<_> = ["own0", "tail0", "other0", "none0", "policy0"].map(tun).into();
        let calls = Map::programs("cilium_calls_netdev_00002");
        let tail = Code::tc("tail_handle_ipv4_from_netdev")
            .with_btf()
            .uses(&services)
            .calls(&calls)
            .load();
        calls.put(7, &tail);
        let twin = Map::hash("cilium_lb4_services_v2", 12, 12);
        // The policy array leads to any endpoint's programs: it is not followed.
        let policy = Map::programs("cilium_call_policy");
        policy.put(7, &tail);
        let loaded = |name, code: Code<'_>| {
            let program = code.load();
            let link = program.tcx(index(name), TCX_INGRESS, false);
            (program, link)
        };
        let _held: Vec<(Program, Link)> = vec![
            loaded("own0", Code::tc("cil_from_netdev").uses(&services)),
            loaded("tail0", Code::tc("cil_from_netdev").calls(&calls)),
            loaded("other0", Code::tc("cil_from_netdev").uses(&twin)),
            loaded("none0", Code::tc("cil_from_netdev")),
            loaded("policy0", Code::tc("cil_from_container").with_btf().calls(&policy)),
        ];
        let (seen, found) = look(&lab);
        for (name, expected) in [
            ("own0", Reach::Itself),
            ("tail0", Reach::TailCall { via: vec!["tail_handle_ipv4_from_netdev".to_owned()] }),
            ("other0", Reach::OtherMap { map: twin.id }),
            ("none0", Reach::No),
            ("policy0", Reach::No),
            ("lo", Reach::NoProgram),
        ] {
            let device = datapath::device(&seen, index(name)).expect("the device");
            assert_eq!(device.services(Family::V4), Some(expected), "{name}: {device:#?}");
        }
        assert_eq!(finding_ids(&found), ["stale-pins"]);
        let stale = &found.stale_maps[0];
        assert_eq!((stale.pinned, stale.used), (services.id, twin.id));
        assert_eq!(stale.name, "cilium_lb4_services_v2");
        // Names longer than the kernel's 15 bytes come from BTF.
        let policy0 = datapath::device(&seen, index("policy0")).expect("the device");
        assert_eq!(policy0.programs[0].name.as_deref(), Some("cil_from_container"));
        let tail = attachments(&seen).program(tail.id).expect("the tail-called program");
        assert_eq!((tail.name.as_str(), tail.name_cut), ("tail_handle_ipv4_from_netdev", false));
    });
}

#[test]
fn programs_are_described() {
    let lab = lab();
    Host::new().run(|| {
        let _eno1 = tun("eno1");
        let constants = Map::constants(14, 70_000);
        let cut = Code::tc("cil_from_container").uses(&constants).load();
        let _link = cut.tcx(index("eno1"), TCX_INGRESS, false);
        let (seen, _) = look(&lab);
        let program = attachments(&seen).program(cut.id).expect("the program");
        // Without BTF, the name stays cut, and that is said.
        assert_eq!((program.name.as_str(), program.name_cut), ("cil_from_contai", true));
        assert_eq!(program.program_type, bpf::SCHED_CLS);
        assert_eq!(program.tag.len(), 16);
        assert_ne!(program.loaded_ns, 0);
        assert_eq!(program.maps, [constants.id]);
        assert_eq!(
            program.constants,
            BTreeMap::from([("eth_header_length".to_owned(), 14), ("limit".to_owned(), 70_000)])
        );
    });
}

#[test]
fn a_pin_of_a_device_that_is_gone_holds_nothing() {
    let lab = lab();
    let elsewhere = Host::new();
    let host = Host::new();
    // A device of another network namespace, with an index that the first one has not.
    let other = elsewhere.run(|| {
        let devices: Vec<_> = (0..20).map(|number| tun(&format!("t{number}"))).collect();
        let link = Code::tc("cil_from_container").load().tcx(index("t19"), TCX_INGRESS, false);
        link.pin(&lab.bpffs().join("cilium/endpoints/7/links/cil_from_container"));
        (devices, link)
    });
    host.run(|| {
        let wg0 = tun("wg0");
        let program = Code::tc("cil_from_netdev").load();
        let link = program.tcx(index("wg0"), TCX_INGRESS, false);
        let pin = pin_path(&lab, "wg0", "cil_from_netdev");
        link.pin(&pin);
        drop(wg0);
        let (seen, found) = look(&lab);
        let idle: Vec<_> = found.idle_pins.iter().map(|pin| pin.path.as_str()).collect();
        assert_eq!(idle, [pin.to_str().expect("UTF-8")], "{:#?}", found.idle_pins);
        assert_eq!(found.idle_pins[0].why, "its device is gone");
        assert_eq!(finding_ids(&found), ["pin-holds-nothing"]);
        let links = &attachments(&seen).links;
        assert_eq!(links.len(), 2);
        let of_pod = links.iter().find(|link| link.path.contains("endpoints")).expect("its pin");
        assert_eq!((of_pod.defunct, of_pod.shown), (false, None));

        // Now a device with that very index is here too, without the program.
        let _devices: Vec<_> = (0..20).map(|number| tun(&format!("t{number}"))).collect();
        let (_, found) = look(&lab);
        assert_eq!(found.idle_pins.len(), 2, "{:#?}", found.idle_pins);
    });
    drop(other);
}

/// A cgroup below the root, gone when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(parent: &Path, name: &str) -> Self {
        let folder = parent.join(name);
        fs::create_dir(&folder).unwrap_or_else(|error| {
            panic!("{}: {error}; this test needs root and cgroup2", folder.display())
        });
        Self(folder)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was killed leaves its cgroup a moment later.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() || !self.0.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(std::thread::panicking(), "{} could not be removed", self.0.display());
    }
}

/// A process that waits, killed when dropped.
struct Sleeper(Child);

impl Sleeper {
    fn new(cgroup: &Cgroup) -> Self {
        let child = Command::new("sleep").arg("600").spawn().expect("sleep");
        fs::write(cgroup.0.join("cgroup.procs"), child.id().to_string()).expect("moving a process");
        Self(child)
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        // Already over, or gone with this call: either is well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn socket_hooks_in_force_are_seen_with_inherited_ones_and_a_dying_cgroup() {
    let lab = lab();
    let services = services(&lab);
    let mounts = inspector::sys::cgroup::mounts().expect("the mount table");
    let root = &mounts.first().expect("cgroup2, on this machine").target;
    let outer = Cgroup::new(root, &format!("inspector-test-{}", std::process::id()));
    let inner = Cgroup::new(&outer.0, "pod");
    let sleeper = Sleeper::new(&inner);
    let connect =
        Code::socket("cil_sock4_connect", INET4_CONNECT).with_btf().uses(&services).load();
    let folder = fs::File::open(&outer.0).expect("the cgroup");
    let link = connect.cgroup(folder.as_fd(), INET4_CONNECT);
    let pin = lab.bpffs().join("cilium/socketlb/links/cgroup/cil_sock4_connect");
    link.pin(&pin);
    let inner_folder = fs::File::open(&inner.0).expect("the cgroup");
    let foreign = Code::socket("firewall", UDP4_SENDMSG).load();
    let foreign_link = foreign.cgroup(inner_folder.as_fd(), UDP4_SENDMSG);

    let pid = sleeper.0.id();
    let subjects = [CgroupSubject::Root, CgroupSubject::Own, CgroupSubject::Process(pid)];
    let (found, sources) = collect::programs::collect(lab.bpffs(), &subjects);
    for source in &sources {
        assert_eq!(source.status, SourceStatus::Complete, "{source:?}");
    }
    let subject = format!("pid {pid}");
    let of_pid: Vec<_> = found
        .cgroup
        .iter()
        .filter(|hook| hook.subject == subject)
        .map(|hook| (hook.attach_type.as_str(), hook.program))
        .collect();
    assert_eq!(of_pid, [("connect4", connect.id), ("sendmsg4", foreign.id)]);
    // Neither the root nor this process, which is elsewhere, has them.
    assert!(
        found.cgroup.iter().all(
            |hook| hook.subject == subject || ![connect.id, foreign.id].contains(&hook.program)
        )
    );
    assert_eq!(found.cgroups.len(), 3);
    let below = format!("/inspector-test-{}", std::process::id());
    assert_eq!(found.cgroups[2].cgroup.as_deref(), Some(format!("{below}/pod").as_str()));
    assert_eq!(found.links.len(), 1);
    assert_eq!(found.links[0].cgroup.as_deref(), Some(below.as_str()));
    assert!(!found.links[0].defunct);

    let mut seen = evidence(&lab);
    seen.attachments = Some(found);
    let socket = datapath::socket(&seen, &subject).expect("it was asked for");
    assert_eq!(socket.services("connect4"), Some(Reach::Itself));
    assert_eq!(socket.services("sendmsg4"), Some(Reach::NoProgram));
    assert_eq!(socket.programs[0].name.as_deref(), Some("cil_sock4_connect"));
    assert!(!socket.programs[1].is_cilium);
    let own = datapath::socket(&seen, "self").expect("it was asked for");
    assert_eq!(own.services("connect4"), Some(Reach::NoProgram));
    assert_eq!(datapath::socket(&seen, "pid 1"), None);

    drop(sleeper);
    drop((foreign_link, inner_folder, folder, inner, outer));
    let (seen, found) = look(&lab);
    assert!(attachments(&seen).links[0].defunct, "{:?}", attachments(&seen).links);
    assert_eq!(found.idle_pins.len(), 1);
    assert_eq!(found.idle_pins[0].why, "its cgroup is gone");
}

#[test]
fn a_process_that_is_not_there_is_told_and_hides_nothing() {
    let lab = lab();
    let mut child = Command::new("true").spawn().expect("true");
    child.wait().expect("it ends");
    let subjects = [CgroupSubject::Process(child.id()), CgroupSubject::Root];
    let (found, sources) = collect::programs::collect(lab.bpffs(), &subjects);
    let [gone, root] = found.cgroups.as_slice() else { panic!("{:?}", found.cgroups) };
    assert!(gone.problem.is_some() && root.problem.is_none(), "{:?}", found.cgroups);
    let source = sources.iter().find(|source| source.what == CGROUPS).expect("the source");
    assert_eq!(source.status, SourceStatus::Partial);
}

#[test]
fn programs_that_are_replaced_all_the_time_are_no_error() {
    let lab = lab();
    let services = services(&lab);
    let host = Host::new();
    host.run(|| {
        let _eno1 = tun("eno1");
        let eno1 = index("eno1");
        let stop = AtomicBool::new(false);
        let (mut whole, mut partial) = (0, 0);
        std::thread::scope(|scope| {
            // Inherits the network namespace.
            let replacing = scope.spawn(|| {
                let mut replaced = 0;
                while !stop.load(Ordering::Relaxed) {
                    let program = Code::tc("cil_from_netdev").uses(&services).load();
                    drop(program.tcx(eno1, TCX_INGRESS, false));
                    replaced += 1;
                }
                replaced
            });
            for _ in 0..300 {
                let seen = evidence(&lab);
                let details =
                    seen.sources.iter().find(|source| source.what == DETAILS).expect("the source");
                match details.status {
                    SourceStatus::Complete => {
                        whole += 1;
                        for hook in &attachments(&seen).hooks {
                            let program = attachments(&seen).program(hook.program);
                            assert!(program.is_some(), "{hook:?} is not described");
                        }
                    }
                    SourceStatus::Partial => {
                        partial += 1;
                        let reason = details.reason.as_deref().unwrap_or_default();
                        assert!(reason.contains("vanished"), "{reason}");
                        let device = datapath::device(&seen, eno1).expect("the device");
                        assert_ne!(device.services(Family::V4), Some(Reach::No));
                    }
                    other => panic!("{other:?}: {details:?}"),
                }
            }
            stop.store(true, Ordering::Relaxed);
            let replaced = replacing.join().expect("the replacing thread");
            assert!(replaced > 100, "only {replaced} programs were replaced");
        });
        assert_eq!(whole + partial, 300);
        assert!(whole > 0);
    });
}

#[test]
fn the_command_shows_it_on_80_columns_and_from_a_file() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let (_eno1, _lxc) = (tun("eno1"), tun("lxc2082d2686dee"));
        let from = Code::tc("cil_from_netdev").uses(&services).load();
        let link = from.tcx(index("eno1"), TCX_INGRESS, false);
        link.pin(&pin_path(&lab, "eno1", "cil_from_netdev"));
        let pod = Code::tc("cil_from_container").with_btf().load();
        let _pod_link = pod.tcx(index("lxc2082d2686dee"), TCX_INGRESS, false);

        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("evidence.json");
        let file = file.to_str().expect("UTF-8");
        let run = |arguments: &[&str]| {
            let output = Command::new(env!("CARGO_BIN_EXE_inspect"))
                .args(arguments)
                .env("INSPECT_BPFFS", lab.bpffs())
                .stderr(Stdio::piped())
                .output()
                .expect("the program runs");
            assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
            String::from_utf8(output.stdout).expect("UTF-8")
        };
        let live = run(&["datapath", "--save", file]);
        assert!(live.contains("eno1 ("), "{live}");
        let row = live.lines().find(|line| line.starts_with("eno1 (")).expect("a row for eno1");
        let cells: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(cells[2..6], ["tcx", "ingress", "cil_from_netdev", &from.id.to_string()]);
        assert!(row.contains("IPv4 itself, IPv6 no") && row.ends_with("pin"), "{row}");
        assert!(live.contains("Without programs: lo (1)"), "{live}");
        let document = Document::read(Path::new(file)).expect("evidence");
        let found = datapath::datapath(&document.evidence).expect("attached programs");
        let report = Report { datapath: &found, evidence: &document.evidence };
        let mut narrow = Vec::new();
        let style = Style { width: 80, color: false, quiet: false, verbose: false };
        report.write_table(style, &mut narrow).expect("a table");
        let narrow = String::from_utf8(narrow).expect("UTF-8");
        for line in narrow.lines() {
            assert!(line.chars().count() <= 80, "{} columns: {line}", line.chars().count());
        }
        assert!(narrow.contains("cil_from_container"), "{narrow}");
        assert_eq!(run(&["datapath", "--from", file]), live);
        let markdown = run(&["datapath", "--from", file, "-o", "markdown"]);
        assert!(markdown.contains("| eno1 ("), "{markdown}");
        let json: Value =
            serde_json::from_str(&run(&["datapath", "--from", file, "-o", "json"])).expect("JSON");
        assert_eq!(json["schema"], "inspector.datapath/1");
        let device = json["devices"]
            .as_array()
            .and_then(|devices| devices.iter().find(|device| device["name"] == "eno1"))
            .expect("the device");
        assert_eq!(device["programs"][0]["services_v4"]["reaches"], "itself");
        assert_eq!(device["programs"][0]["services_v6"]["reaches"], "no");

        // A file of programs alone has no answer about a VIP, and says so.
        let output = Command::new(env!("CARGO_BIN_EXE_inspect"))
            .args(["vip", "192.168.2.20", "--from", file])
            .output()
            .expect("the program runs");
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("no map entries"), "{output:?}");
    });
}

#[test]
fn without_the_privilege_it_is_said_what_is_missing() {
    let lab = lab();
    let output = Host::new().run(|| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
        command.arg("datapath").env("INSPECT_BPFFS", lab.bpffs());
        // Root without CAP_NET_ADMIN and CAP_SYS_ADMIN: maps can be read, hooks not asked for.
        // SAFETY: prctl(2) is async-signal-safe and takes numbers alone.
        unsafe {
            command.pre_exec(|| {
                for capability in [12, 21] {
                    if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        command.output().expect("the program runs")
    });
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("programs per device: bpf(BPF_PROG_QUERY)"), "{stdout}");
    assert!(stdout.contains("run as root, or with CAP_NET_ADMIN"), "{stdout}");
}

#[test]
fn looking_changes_nothing() {
    let lab = lab();
    let services = services(&lab);
    Host::new().run(|| {
        let _eno1 = tun("eno1");
        let eno1 = index("eno1");
        clsact(eno1);
        let from = Code::tc("cil_from_netdev").uses(&services).load();
        from.filter(eno1, false, "cil_from_netdev-eno1", 1);
        let link = from.tcx(eno1, TCX_INGRESS, false);
        link.pin(&pin_path(&lab, "eno1", "cil_from_netdev"));
        let (before, _) = look(&lab);
        let (after, _) = look(&lab);
        assert_eq!(before.attachments, after.attachments);
        drop(link);
        // The pin still holds it.
        let (later, _) = look(&lab);
        assert_eq!(later.attachments, after.attachments);
        fs::remove_file(pin_path(&lab, "eno1", "cil_from_netdev")).expect("the pin");
        // The kernel lets go of a link a moment after its pin is gone.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while hooks(&look(&lab).0, eno1) != [(HookKind::ClsactIngress, 0, from.id)] {
            assert!(std::time::Instant::now() < deadline, "{:?}", hooks(&look(&lab).0, eno1));
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    });
}
