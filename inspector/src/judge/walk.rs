//! Walks a model packet through the recorded state, in the order of the datapath.
//!
//! For each frontend and path: which program does the packet meet, does that program reach the
//! services map, which entry is found, may the source use it, may it be reached from outside, is it
//! L7, has it a backend, does the reply come back. Each step that could not be read ends in
//! `unknown` and says what is missing. What the maps settle alone is settled without the programs:
//! a frontend without a backend serves nobody, whatever is attached.

use std::{collections::BTreeMap, net::IpAddr};

use super::{
    Grade, Outcome, PathVerdict, Served,
    attached::{Device, Facts, Met},
    programmed::{Location, Programmed, ProgrammedFrontend, SourceRanges},
    simulated::Weight,
    stack,
};
use crate::{
    cilium::{
        flags::ServiceType,
        ipcache::Identity,
        layout::MapKind,
        proto::Protocol,
        release::{NoBackend, SocketAnswer},
        services::Scope,
    },
    evidence::{Evidence, VipQuery, tables::Tables},
};

/// What the maps say of one scope of a frontend to a program that looks it up.
#[derive(Debug, Clone)]
enum Step {
    /// It ends here, and nobody is served.
    Ends(Outcome, String),
    /// Nothing is found: the packet goes on as it is.
    NotFound(String),
    /// It is handed to a local proxy.
    Proxied(u16),
    /// It is translated to a backend.
    Translated {
        /// Share of connections that is served, where it is neither 0 nor 1.
        share: Option<f64>,
        /// Whether the reply comes back, or who may use it.
        served: Served,
        why: Vec<String>,
    },
    /// It is left to a local proxy, which is to take it from the stack.
    Delegated(String),
    /// It cannot be told.
    Unknown(String),
}

/// The parts that every walk needs.
pub(super) struct Walk<'e> {
    evidence: &'e Evidence,
    tables: &'e Tables,
    programmed: &'e Programmed,
    query: &'e VipQuery,
    facts: &'e Facts,
}

/// Every frontend on every path.
pub(super) fn paths(
    evidence: &Evidence,
    tables: &Tables,
    programmed: &Programmed,
    query: &VipQuery,
    facts: &Facts,
) -> Vec<PathVerdict> {
    let walk = Walk { evidence, tables, programmed, query, facts };
    let mut paths = Vec::new();
    for (external, internal) in scopes(programmed) {
        let Some(name) = external.or(internal).map(|frontend| &frontend.frontend) else { continue };
        let name = name.trim_end_matches("/i");
        if walk.facts.devices.is_empty() && evidence.network.is_none() {
            let met = Met::NotRead("which programs run on the device was not read".to_owned());
            paths.push(walk.forwarded(name, "forwarded".to_owned(), None, external, &met));
        }
        for (device, met) in &walk.facts.devices {
            let path = format!("forwarded via {}", device.name);
            paths.push(walk.forwarded(name, path, Some(device), external, met));
        }
        // Sockets and pods see the internal scope where there is one of its own.
        let separate = external.is_none_or(|frontend| frontend.two_scopes);
        let inside = if separate { internal.or(external) } else { external };
        paths.push(walk.socket(name, inside));
        paths.push(walk.pod(name, inside));
        paths.extend(walk.forwarded_from_pod(name, inside));
    }
    paths
}

/// The scopes of each port and protocol: external and internal.
fn scopes(
    programmed: &Programmed,
) -> impl Iterator<Item = (Option<&ProgrammedFrontend>, Option<&ProgrammedFrontend>)> {
    let mut ports: BTreeMap<(u16, Protocol), (Option<_>, Option<_>)> = BTreeMap::new();
    for frontend in &programmed.frontends {
        let (external, internal) = ports.entry((frontend.port, frontend.protocol)).or_default();
        match frontend.scope {
            Scope::External => *external = Some(frontend),
            Scope::Internal => *internal = Some(frontend),
            Scope::Other(_) => {}
        }
    }
    ports.into_values()
}

/// A verdict that is filled in on the way.
fn verdict(frontend: &str, path: String, device: Option<&str>) -> PathVerdict {
    PathVerdict {
        frontend: frontend.to_owned(),
        path,
        device: device.map(str::to_owned),
        outcome: Outcome::Unknown,
        served: Served::Unknown,
        share: None,
        grade: Grade::Programmed,
        why: Vec::new(),
        neighbour: None,
        simulated: None,
        injected: None,
    }
}

impl Walk<'_> {
    /// A packet that is received on a device.
    fn forwarded(
        &self,
        name: &str,
        path: String,
        device: Option<&Device>,
        external: Option<&ProgrammedFrontend>,
        met: &Met,
    ) -> PathVerdict {
        let mut verdict = verdict(name, path, device.map(|device| device.name.as_str()));
        let input = device.map(|device| device.ifindex);
        match met {
            Met::LoadBalancer(text) => {
                verdict.why.extend(text.clone());
                let step = delegated(self.step(external, true, device), external);
                self.apply(&mut verdict, step, external, true, input);
            }
            // Whatever the programs are: where the maps lead nowhere, nobody is served.
            Met::NotRead(missing) | Met::Unsure(missing) => {
                match delegated(self.step(external, true, device), external) {
                    Step::Ends(outcome, why) => {
                        verdict.outcome = outcome;
                        verdict.served = Served::No;
                        verdict.why.push(why);
                    }
                    Step::NotFound(why) => {
                        verdict.outcome = Outcome::Untranslated;
                        verdict.served = Served::No;
                        verdict.why.push(why);
                    }
                    Step::Proxied(port) => verdict.why.push(format!(
                        "L7: handed to the local proxy port {port} if the datapath was built with \
                         L7 load balancing"
                    )),
                    Step::Translated { share, served, why } => {
                        verdict.share = share;
                        // That the reply does not come back is certain all the same.
                        if served == Served::No {
                            verdict.served = Served::No;
                        }
                        verdict.why.extend(why);
                    }
                    Step::Delegated(why) | Step::Unknown(why) => verdict.why.push(why),
                }
                if verdict.outcome == Outcome::Unknown {
                    verdict.why.push(missing.clone());
                }
            }
            Met::Nothing(text) | Met::NoLoadBalancer(text) => {
                verdict.why.push(text.clone());
                self.untranslated(&mut verdict, input);
            }
        }
        if let Some(device) = device {
            self.simulated(&mut verdict, device, external, met);
        }
        verdict
    }

    /// What simulated packets add to a forwarded path, or say against it.
    fn simulated(
        &self,
        verdict: &mut PathVerdict,
        device: &Device,
        external: Option<&ProgrammedFrontend>,
        met: &Met,
    ) {
        let ranges = external.and_then(|frontend| frontend.source_ranges.as_ref());
        let admits = |source| match ranges.map(|ranges| ranges.admit(source)) {
            Some(Some(admitted)) => admitted,
            Some(None) | None => true,
        };
        let runs = &self.facts.simulated;
        let (ifindex, name) = (device.ifindex, &verdict.frontend);
        let backends: Vec<String> = external
            .iter()
            .flat_map(|frontend| &frontend.backends)
            .filter_map(|backend| backend.address.clone())
            .collect();
        let (evidence, tables) = (self.evidence, self.tables);
        let Some(proof) = runs.path(evidence, tables, ifindex, name, &backends, admits) else {
            return;
        };
        match proof.weigh(verdict) {
            Weight::Nothing => {}
            Weight::Translated => {
                verdict.neighbour =
                    external.map(|frontend| stack::after_translation(self.evidence, frontend));
                // That it is translated was all that was missing.
                if verdict.served == Served::Unknown
                    && let Met::LoadBalancer(_) = met
                    && let Step::Translated { share, served, why } = self.balanced(external, true)
                {
                    verdict.served = served;
                    verdict.share = verdict.share.or(share);
                    verdict.why.extend(why);
                }
            }
            Weight::Untranslated => {
                verdict.share = None;
                self.untranslated(verdict, Some(device.ifindex));
            }
        }
    }

    /// A process in the host network namespace.
    fn socket(&self, name: &str, inside: Option<&ProgrammedFrontend>) -> PathVerdict {
        let mut verdict = verdict(name, "socket on host".to_owned(), None);
        let udp = inside.is_some_and(|frontend| frontend.protocol == Protocol::UDP);
        self.through_socket(&mut verdict, inside, &self.facts.host[usize::from(udp)], None);
        verdict
    }

    /// A process in a pod: its socket, else its device.
    fn pod(&self, name: &str, inside: Option<&ProgrammedFrontend>) -> PathVerdict {
        let mut verdict = verdict(name, "pod".to_owned(), None);
        let udp = inside.is_some_and(|frontend| frontend.protocol == Protocol::UDP);
        let device = self.facts.pods.as_ref();
        let host_only = self.config("ENABLE_SOCKET_LB_HOST_ONLY");
        // A program on the pods' devices that reaches the services map translates what the socket
        // did not.
        if let Some(met @ Met::LoadBalancer(_)) = device
            && (host_only == Some(true) || host_only.is_none())
        {
            self.through_device(&mut verdict, inside, met);
            return verdict;
        }
        if host_only == Some(true) {
            let met = Met::Nothing("socket-LB serves the host network namespace only".to_owned());
            self.through_socket(&mut verdict, inside, &met, device);
        } else {
            self.through_socket(&mut verdict, inside, &self.facts.root[usize::from(udp)], device);
        }
        verdict
    }

    /// A packet that a pod forwards: no socket of this node, its device alone.
    fn forwarded_from_pod(
        &self,
        name: &str,
        inside: Option<&ProgrammedFrontend>,
    ) -> Option<PathVerdict> {
        let met = self.facts.pods.as_ref()?;
        let mut verdict = verdict(name, "forwarded from pod".to_owned(), None);
        self.through_device(&mut verdict, inside, met);
        Some(verdict)
    }

    /// What the program on the pods' devices does.
    fn through_device(
        &self,
        verdict: &mut PathVerdict,
        inside: Option<&ProgrammedFrontend>,
        met: &Met,
    ) {
        match met {
            Met::LoadBalancer(text) => {
                verdict.why.extend(text.clone());
                let step = delegated(self.step(inside, false, None), inside);
                self.apply(verdict, step, inside, false, None);
            }
            Met::Nothing(text) | Met::NoLoadBalancer(text) => {
                verdict.why.push(text.clone());
                self.untranslated(verdict, None);
            }
            Met::NotRead(text) | Met::Unsure(text) => verdict.why.push(text.clone()),
        }
    }

    /// What connect and sendmsg do; `device` is what the packet meets when they do nothing.
    fn through_socket(
        &self,
        verdict: &mut PathVerdict,
        inside: Option<&ProgrammedFrontend>,
        met: &Met,
        device: Option<&Met>,
    ) {
        match met {
            Met::LoadBalancer(text) => {
                verdict.why.extend(text.clone());
                let step = self.step(inside, false, None);
                match inside.map_or(Skipped::No, |inside| self.skipped(inside)) {
                    Skipped::No => {}
                    Skipped::Yes(why) => {
                        verdict.why.push(why);
                        match device {
                            Some(device) => self.through_device(verdict, inside, device),
                            None => self.untranslated(verdict, None),
                        }
                        return;
                    }
                    Skipped::Delegated(why) => {
                        match device {
                            Some(device @ Met::LoadBalancer(_)) => {
                                verdict.why.push(why);
                                self.through_device(verdict, inside, device);
                            }
                            _ => self.left_to_proxy(verdict, why, None),
                        }
                        return;
                    }
                    Skipped::Unknown(why) => {
                        verdict.why.push(why);
                        return;
                    }
                }
                match step {
                    Step::Translated { share, served, why } => {
                        verdict.outcome = Outcome::SocketTranslated;
                        verdict.share = share;
                        verdict.served = served;
                        verdict.why.extend(why);
                        verdict.neighbour =
                            inside.map(|inside| stack::after_translation(self.evidence, inside));
                    }
                    step => self.apply(verdict, step, inside, false, None),
                }
            }
            Met::Nothing(text) | Met::NoLoadBalancer(text) => {
                verdict.why.push(text.clone());
                match device {
                    Some(device) => self.through_device(verdict, inside, device),
                    None => self.untranslated(verdict, None),
                }
            }
            Met::NotRead(text) | Met::Unsure(text) => {
                match self.step(inside, false, None) {
                    Step::Ends(outcome, why) => {
                        verdict.outcome = outcome;
                        verdict.served = Served::No;
                        verdict.why.push(why);
                        return;
                    }
                    Step::NotFound(why) | Step::Delegated(why) | Step::Unknown(why) => {
                        verdict.why.push(why);
                    }
                    Step::Proxied(port) => verdict.why.push(format!(
                        "L7: to the local proxy port {port} if the datapath was built with L7 load \
                         balancing"
                    )),
                    Step::Translated { share, why, .. } => {
                        verdict.share = share;
                        verdict.why.extend(why);
                    }
                }
                verdict.why.push(text.clone());
            }
        }
    }

    /// Whether the socket programs leave the address of a frontend as it is, although they find it:
    /// of externalIPs and host ports they translate only what the IP cache knows as the node's own,
    /// so that no Service can take over an address of someone else (`sock4_skip_xlate` of
    /// `bpf_sock.c`).
    fn skipped(&self, frontend: &ProgrammedFrontend) -> Skipped {
        // One without backends is refused before this is looked at.
        if !frontend.master || (frontend.count == 0 && frontend.l7_proxy_port.is_none()) {
            return Skipped::No;
        }
        if frontend.delegated && self.tables.releases.behaviour().delegates_sockets {
            return Skipped::Delegated(
                "it leaves a delegated frontend alone: a local proxy is to take the packets"
                    .to_owned(),
            );
        }
        let mitigated = || self.config("DISABLE_EXTERNAL_IP_MITIGATION") != Some(true);
        let what = match frontend.service_type {
            ServiceType::ExternalIps if mitigated() => "an external IP",
            ServiceType::HostPort if !frontend.address.is_loopback() => "a host port",
            _ => return Skipped::No,
        };
        if let Some(entry) = self.tables.ipcache.get(&frontend.address)
            && entry.identity == Identity::HOST
        {
            return Skipped::No;
        }
        let problem = match self.tables.doubt(MapKind::Ipcache, frontend.address) {
            Some(problem) => Some(problem.to_string()),
            None if self.evidence.maps.iter().any(|map| map.name.starts_with("cilium_ipcache")) => {
                None
            }
            None => Some("there is no IP cache".to_owned()),
        };
        if let Some(problem) = problem {
            return Skipped::Unknown(format!(
                "{what} is translated only if it is an address of this node, which cannot be \
                 told: {problem}"
            ));
        }
        Skipped::Yes(format!(
            "it leaves {what} alone that is no address of this node for the IP cache: the socket \
             keeps the VIP"
        ))
    }

    /// Fills in what a step comes to for a packet that met a load-balancing program.
    fn apply(
        &self,
        verdict: &mut PathVerdict,
        step: Step,
        frontend: Option<&ProgrammedFrontend>,
        from_outside: bool,
        input: Option<u32>,
    ) {
        match step {
            Step::Ends(outcome, why) => {
                verdict.outcome = outcome;
                verdict.served = Served::No;
                verdict.why.push(why);
                verdict.neighbour = Some("none: it ends in BPF".to_owned());
                if outcome == Outcome::Untranslated {
                    self.untranslated(verdict, input);
                }
            }
            Step::NotFound(why) => {
                verdict.why.push(why);
                self.untranslated(verdict, input);
            }
            Step::Proxied(port) => self.proxied(verdict, port, frontend, from_outside),
            Step::Translated { share, served, why } => {
                verdict.outcome = Outcome::DnatBeforeNeigh;
                verdict.share = share;
                verdict.served = served;
                verdict.why.extend(why);
                verdict.neighbour =
                    frontend.map(|frontend| stack::after_translation(self.evidence, frontend));
            }
            Step::Delegated(why) => self.left_to_proxy(verdict, why, input),
            Step::Unknown(why) => verdict.why.push(why),
        }
    }

    /// A packet that goes up the stack as it is, where a local proxy is to take it.
    fn left_to_proxy(&self, verdict: &mut PathVerdict, why: String, input: Option<u32>) {
        verdict.why.push(why);
        self.untranslated(verdict, input);
        if verdict.served == Served::No {
            verdict.served = Served::Unknown;
            verdict.why.push("unless a proxy's own rules take it, which are not judged".to_owned());
        }
    }

    /// A packet that keeps the VIP as destination.
    fn untranslated(&self, verdict: &mut PathVerdict, input: Option<u32>) {
        let result = stack::untranslated(self.evidence, self.programmed, self.query.address, input);
        verdict.outcome = Outcome::Untranslated;
        verdict.served = result.served;
        verdict.why.push(result.why);
        verdict.neighbour = result.neighbour;
        if self.facts.others_translate && verdict.served == Served::No {
            verdict.served = Served::Unknown;
            verdict.why.push(
                "unless kube-proxy translates it first, whose rules are not judged".to_owned(),
            );
        }
    }

    /// A packet for an L7 frontend.
    fn proxied(
        &self,
        verdict: &mut PathVerdict,
        port: u16,
        frontend: Option<&ProgrammedFrontend>,
        from_outside: bool,
    ) {
        match self.l7() {
            L7::No(why) => {
                verdict.why.push(why);
                let step = self.balanced(frontend, from_outside);
                self.apply(verdict, step, frontend, from_outside, None);
            }
            L7::Yes(why) => {
                verdict.outcome = Outcome::ProxiedBeforeNeigh;
                verdict.neighbour = Some("none: handed to the local proxy".to_owned());
                verdict.why.push(format!("{why}: handed to the local proxy port {port}"));
                let Some(network) = &self.evidence.network else { return };
                let v6 = self.query.address.is_ipv6();
                let way = stack::proxy_way(self.evidence, network, port, v6);
                verdict.served = match (way.broken.is_empty(), way.unread.is_empty()) {
                    (false, _) => Served::No,
                    (true, true) => Served::Yes,
                    (true, false) => {
                        verdict.why.push(format!("{} not read", way.unread.join(", ")));
                        Served::Unknown
                    }
                };
                verdict.why.extend(way.broken);
            }
            L7::Unknown(why) => {
                verdict.why.push(format!("L7, proxy port {port}: {why}"));
            }
        }
    }

    /// Whether the datapath knows L7 frontends.
    fn l7(&self) -> L7 {
        match self.config("ENABLE_L7_LB") {
            Some(true) => return L7::Yes("L7".to_owned()),
            Some(false) => {
                return L7::No(
                    "the datapath was built without L7: balanced like any other".to_owned(),
                );
            }
            None => {}
        }
        let Some(network) = &self.evidence.network else {
            return L7::Unknown(
                "whether the datapath was built with L7 load balancing was not read".to_owned(),
            );
        };
        if stack::has_proxy_rule(network, self.query.address.is_ipv6()) {
            L7::Yes("L7 (the rule for proxied packets is there)".to_owned())
        } else {
            L7::Unknown(
                "no rule sends marked packets to the proxy, and what the datapath was built with \
                 was not read: either it was built without L7 and balances, or the way to the \
                 proxy is broken"
                    .to_owned(),
            )
        }
    }

    /// A switch of `node_config.h`, if that file was read.
    fn config(&self, name: &str) -> Option<bool> {
        let config = &self.evidence.network.as_ref()?.node_config;
        (!config.is_empty()).then(|| config.contains_key(name))
    }

    /// What the maps say to a program that looks `frontend` up, in the datapath's own order.
    fn step(
        &self,
        frontend: Option<&ProgrammedFrontend>,
        from_outside: bool,
        device: Option<&Device>,
    ) -> Step {
        let scope = if from_outside { "external" } else { "internal" };
        let Some(frontend) = frontend.filter(|frontend| frontend.master) else {
            return if from_outside && !self.programmed.wildcards.is_empty() {
                Step::Ends(
                    Outcome::Dropped,
                    format!("no {scope} entry; the address's wildcard entry drops the packet"),
                )
            } else {
                Step::NotFound(format!("no {scope} entry: nothing translates the packet"))
            };
        };
        if from_outside {
            match frontend.source_ranges.as_ref().map(|ranges| self.allowed(ranges, device)) {
                Some(Allowed::Nobody(why)) => return Step::Ends(Outcome::Denied, why),
                Some(Allowed::Unknown(why)) => return Step::Unknown(why),
                Some(Allowed::Some(why)) => {
                    return match self.after_checks(frontend, from_outside) {
                        Step::Translated { share, served, why: mut reasons } => {
                            reasons.insert(0, why);
                            Step::Translated { share, served, why: reasons }
                        }
                        step => step,
                    };
                }
                Some(Allowed::All) | None => {}
            }
        }
        self.after_checks(frontend, from_outside)
    }

    fn after_checks(&self, frontend: &ProgrammedFrontend, from_outside: bool) -> Step {
        if from_outside && !frontend.routable {
            return Step::Ends(
                Outcome::Dropped,
                "the entry is not routable: it may not be reached from outside".to_owned(),
            );
        }
        match frontend.l7_proxy_port {
            Some(port) => Step::Proxied(port),
            None => self.balanced(Some(frontend), from_outside),
        }
    }

    /// The choice of a backend.
    fn balanced(&self, frontend: Option<&ProgrammedFrontend>, from_outside: bool) -> Step {
        let Some(frontend) = frontend else {
            return Step::NotFound("no entry".to_owned());
        };
        let scope = match frontend.scope {
            Scope::Internal => "internal",
            _ => "external",
        };
        if frontend.count == 0 {
            let (answer, to_stack) = no_backend_answer(self.tables, from_outside);
            let outcome = if to_stack { Outcome::Untranslated } else { Outcome::NoBackend };
            return Step::Ends(outcome, format!("0 backends in the {scope} scope: {answer}"));
        }
        let unread = frontend.unread();
        if unread > 0 {
            return Step::Unknown(format!(
                "where {unread} of {} slots lead could not be read",
                frontend.count
            ));
        }
        let usable = frontend.usable();
        if usable == 0 {
            return Step::Ends(
                Outcome::NoBackend,
                format!("none of {} slots leads to a backend", frontend.count),
            );
        }
        // By slot, or by place in the Maglev table, which sockets do not use.
        let maglev = frontend.maglev.as_ref().filter(|_| from_outside);
        let (lost, all, what) = match maglev {
            Some(table) => (table.nowhere, table.places, "places of its Maglev table"),
            None => (usize::from(frontend.count) - usable, usize::from(frontend.count), "slots"),
        };
        #[allow(clippy::cast_precision_loss, reason = "at most 131071 places")]
        let share = (lost > 0).then(|| 1.0 - lost as f64 / all as f64);
        let mut why = vec![match lost {
            0 => format!("{all} of {all} {what} lead to a backend"),
            lost => {
                format!("{lost} of {all} {what} lead nowhere: that share of connections fails")
            }
        }];
        let mut served = if lost == 0 { Served::Yes } else { Served::Partly };
        let hops = stack::hops(self.evidence, frontend);
        let dead: Vec<&stack::Hop> = hops.iter().filter(|hop| hop.dead).collect();
        if let Some(first) = dead.first() {
            served = if dead.len() == hops.len() { Served::No } else { Served::Partly };
            why.push(format!(
                "the way to {} of {} backends is dead ({})",
                dead.len(),
                hops.len(),
                first.text
            ));
        }
        if from_outside && frontend.reverse_nat.good == Some(false) {
            served = Served::No;
            why.push(format!(
                "reverse NAT entry {} is missing or wrong: the client gets no usable reply",
                frontend.reverse_nat.id
            ));
        }
        Step::Translated { share, served, why }
    }

    /// Who may use a frontend with source ranges.
    fn allowed(&self, ranges: &SourceRanges, device: Option<&Device>) -> Allowed {
        if !ranges.complete {
            return Allowed::Unknown("source ranges are checked and could not be read".to_owned());
        }
        let verb = if ranges.deny { "denied" } else { "allowed" };
        let list = ranges.ranges.join(" ");
        if let Some(source) = self.query.source {
            let inside = ranges.ranges.iter().any(|range| contains(range, source));
            return if inside == ranges.deny {
                Allowed::Nobody(format!("the source {source} is not let through ({verb}: {list})"))
            } else {
                Allowed::All
            };
        }
        if ranges.ranges.is_empty() {
            return if ranges.deny {
                Allowed::All
            } else {
                Allowed::Nobody(
                    "source ranges are checked and there are none: every source is denied"
                        .to_owned(),
                )
            };
        }
        // Neighbours on the device are the clients that can be told of; others may be routed here.
        let covers = device.is_some_and(|device| {
            !device.networks.is_empty()
                && device
                    .networks
                    .iter()
                    .all(|network| ranges.ranges.iter().any(|range| covers(range, network)))
        });
        if covers && !ranges.deny {
            Allowed::All
        } else {
            Allowed::Some(format!("{ONLY_SOME} ({verb}: {list}); --source ADDR tells for one"))
        }
    }
}

/// What a translation comes to for a packet if the frontend is delegated: one for a backend of this
/// node goes up the stack as it is, for a local proxy (`LB_PUNT_TO_STACK` of `lib/lb.h`).
fn delegated(step: Step, frontend: Option<&ProgrammedFrontend>) -> Step {
    let Some(frontend) = frontend.filter(|frontend| frontend.delegated) else { return step };
    let Step::Translated { share, served, mut why } = step else { return step };
    let chosen = || frontend.backends.iter().filter(|backend| backend.selectable);
    let all = chosen().count();
    let here = chosen()
        .filter(|backend| {
            matches!(backend.location, Location::ThisNode | Location::LocalEndpoint { .. })
        })
        .count();
    if here == 0 {
        return Step::Translated { share, served, why };
    }
    let text = format!(
        "delegated: packets for {here} of {all} backends, which are on this node, are left to a \
         local proxy"
    );
    if here == all {
        return Step::Delegated(text);
    }
    why.push(text);
    let served = if served == Served::Yes { Served::Partly } else { served };
    Step::Translated { share, served, why }
}

/// How the clause about source ranges begins.
pub(super) const ONLY_SOME: &str = "only some sources are let through";

/// Whether L7 frontends are handed to a proxy.
enum L7 {
    Yes(String),
    No(String),
    Unknown(String),
}

/// Whether the socket programs pass a frontend over.
enum Skipped {
    No,
    /// A local proxy is to take it from the stack.
    Delegated(String),
    Yes(String),
    Unknown(String),
}

/// Which sources may use a frontend.
enum Allowed {
    All,
    Some(String),
    Nobody(String),
    Unknown(String),
}

/// Reads `10.0.0.0/8`.
pub(crate) fn cidr(text: &str) -> Option<(IpAddr, u32)> {
    let (address, bits) = text.split_once('/')?;
    Some((address.parse().ok()?, bits.parse().ok()?))
}

/// Whether an address lies in a range; of another family it does not.
pub(crate) fn contains(range: &str, address: IpAddr) -> bool {
    let Some((start, bits)) = cidr(range) else { return false };
    match (start, address) {
        (IpAddr::V4(start), IpAddr::V4(address)) => {
            let mask = u32::MAX.checked_shl(32_u32.saturating_sub(bits)).unwrap_or(0);
            (u32::from(start) ^ u32::from(address)) & mask == 0
        }
        (IpAddr::V6(start), IpAddr::V6(address)) => {
            let mask = u128::MAX.checked_shl(128_u32.saturating_sub(bits)).unwrap_or(0);
            (u128::from(start) ^ u128::from(address)) & mask == 0
        }
        _ => false,
    }
}

/// Whether a range holds all of a network; networks of the other family do not count.
fn covers(range: &str, network: &str) -> bool {
    let (Some((start, bits)), Some((address, length))) = (cidr(range), cidr(network)) else {
        return false;
    };
    if start.is_ipv4() != address.is_ipv4() {
        return true;
    }
    bits <= length && contains(range, address)
}

/// What a client meets at a frontend without backends, in the release at hand, and whether the
/// packet goes up the stack.
fn no_backend_answer(tables: &Tables, from_outside: bool) -> (&'static str, bool) {
    let behaviour = tables.releases.behaviour();
    if from_outside {
        match behaviour.no_backend {
            NoBackend::ToStack => {
                ("the packet goes up the stack as if there were no service", true)
            }
            NoBackend::Drop => ("dropped in BPF", false),
            NoBackend::Reject => {
                ("rejected in BPF with ICMP unreachable (or dropped, as configured)", false)
            }
        }
    } else {
        match behaviour.socket_no_backend {
            SocketAnswer::Untranslated => {
                ("the socket keeps the VIP, its packets go up the stack", true)
            }
            SocketAnswer::NotPermitted => ("connect fails with EPERM", false),
            SocketAnswer::HostUnreachable => ("connect fails with EHOSTUNREACH", false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_in_ranges() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(contains("192.168.2.0/24", address("192.168.2.50")));
        assert!(!contains("192.168.2.0/24", address("192.168.3.50")));
        assert!(contains("0.0.0.0/0", address("8.8.8.8")));
        assert!(contains("10.1.2.3/32", address("10.1.2.3")));
        assert!(!contains("10.1.2.3/32", address("10.1.2.4")));
        assert!(contains("fd00:2::/64", address("fd00:2::50")));
        assert!(!contains("fd00:2::/64", address("fd00:3::50")));
        assert!(!contains("::/0", address("10.0.0.1")));
        assert!(!contains("rubbish", address("10.0.0.1")));
    }

    #[test]
    fn ranges_over_networks() {
        assert!(covers("192.168.0.0/16", "192.168.2.10/24"));
        assert!(!covers("192.168.2.50/32", "192.168.2.10/24"));
        assert!(covers("192.168.2.0/24", "fd00:2::10/64"));
    }
}
