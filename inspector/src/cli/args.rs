//! The arguments as they are typed, and as they are meant.

use std::{ffi::OsString, io::IsTerminal, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand, ValueEnum};
use inspector::{
    collect::network::agent, evidence::VipQuery, inject, judge::expect::Expectation,
    report::lb_list::View, simulate, sys::netns::Netns,
};

/// What a Cilium node has programmed for a `LoadBalancer` VIP, read from the kernel's own maps: no
/// agent needed, nothing modified.
///
/// Exit codes: 0 the answer is yes (served, or every expectation met), 1 the answer is no or only
/// partly yes, 2 usage or environment error, 3 cannot be told (privilege, kernel or traffic missing).
#[derive(Debug, Parser)]
#[command(name = "inspect", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// What every command takes.
    #[command(flatten)]
    pub common: Common,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Say what this node has programmed for a VIP, and what that means.
    Vip(VipArgs),
    /// Hold many VIPs against the expectations of a file.
    ///
    /// The file is YAML, to be kept beside the manifests: a list `vips`, of which each has `vip`
    /// (ADDR[:PORT[/PROTO]]) and may have `via`, `source` and `expect` with the claims of `inspect
    /// vip --expect`; without any, `served` is expected. Exit codes: 0 every expectation is met, 1
    /// one is not, 2 usage or environment error, 3 one cannot be told.
    Check {
        /// The file.
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Services, as `cilium-dbg service` has them.
    Service {
        /// What to do with them.
        #[command(subcommand)]
        list: ServiceCommand,
    },
    /// Load balancer maps, as `cilium-dbg bpf lb` has them.
    Lb {
        /// What to do with them.
        #[command(subcommand)]
        list: LbCommand,
    },
    /// Show which programs are attached where, and which of them load-balance from the pinned maps.
    ///
    /// SERVICES says whether a program reaches the pinned services map: `itself`, by a `tail call`,
    /// `no`, or `OTHER MAP` if it uses one that is not pinned; `-` marks programs that services do
    /// not concern. HELD BY is a `pin` of Cilium's, a `link` without one, or the `hook` itself. Exit codes: 0 nothing is wrong, 1
    /// something is, 3 the devices cannot be asked.
    Datapath(DatapathArgs),
    /// Work on saved evidence; needs no root and no Cilium.
    Evidence {
        /// What to do with it.
        #[command(subcommand)]
        action: EvidenceCommand,
    },
    /// Say which announced Services of a tree of manifests may be left without a backend, before
    /// they are applied; needs no cluster and no root.
    ///
    /// Every Service of type `LoadBalancer` is paired with the `CiliumL2AnnouncementPolicy` that
    /// announces it. Exit codes: 0 each keeps to the rule, 1 one does not, 2 a file cannot be read
    /// or is no YAML, 3 there is nothing to hold against the rule.
    Lint {
        /// Files, folders (every .yaml and .yml below), or `-` for standard input, such as what
        /// `helm template` prints. All of them are taken as one cluster's.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
    },
    /// Show connections to a VIP, or to every one, as they come to an end: where each packet was
    /// seen, where it was translated, which neighbours were looked up, and the answer.
    ///
    /// Until Ctrl-C, unless --for, --count or a command says otherwise. Exit codes: 0 a connection
    /// was seen, 2 usage or environment error, 3 none was, or nothing can be traced here.
    Trace(TraceArgs),
    /// Say what this node, kernel and user can do, and what is missing for what.
    Doctor,
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page (roff).
    Man,
}

/// What can be asked of services.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum ServiceCommand {
    /// Print what `cilium-dbg service list` prints, from the maps alone.
    List,
}

/// What can be asked of the load balancer maps.
#[derive(Debug, Subcommand)]
pub enum LbCommand {
    /// Print what `cilium-dbg bpf lb list` prints.
    List(Views),
}

/// One of the views of `lb list`.
#[derive(Debug, Args)]
#[group(multiple = false)]
#[allow(clippy::struct_excessive_bools, reason = "flags of which one may be given")]
pub struct Views {
    /// The raw service entries.
    #[arg(long)]
    frontends: bool,
    /// The backend map.
    #[arg(long)]
    backends: bool,
    /// The reverse NAT map.
    #[arg(long)]
    revnat: bool,
    /// The source range map.
    #[arg(long)]
    source_ranges: bool,
}

impl Views {
    /// The view that was chosen.
    pub fn view(&self) -> View {
        let Self { frontends, backends, revnat, source_ranges } = *self;
        match (frontends, backends, revnat, source_ranges) {
            (true, ..) => View::Frontends,
            (_, true, ..) => View::Backends,
            (_, _, true, _) => View::RevNat,
            (.., true) => View::SourceRanges,
            _ => View::Services,
        }
    }
}

/// Arguments of `vip`.
#[derive(Debug, Args)]
pub struct VipArgs {
    /// ADDR, ADDR:PORT or ADDR:PORT/PROTO; IPv6 with a port in brackets.
    #[arg(value_name = "ADDR[:PORT[/PROTO]]")]
    pub vip: VipQuery,
    /// Ask Cilium's agent for its frontends, by the API at its socket, to compare.
    #[arg(
        long,
        value_name = "SOCKET",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = agent::SOCKET
    )]
    pub agent: Option<PathBuf>,
    /// State directory of Cilium's agent, instead of /var/run/cilium/state.
    #[arg(long, value_name = "PATH")]
    pub state: Option<PathBuf>,
    /// Judge the socket path for this process, instead of for this one.
    #[arg(long)]
    pub pid: Option<u32>,
    /// Only these devices, instead of all from which clients' packets can come.
    #[arg(long, value_name = "DEV", value_delimiter = ',', value_parser = device)]
    pub via: Vec<String>,
    /// As seen by a client with this address: source ranges depend on it, and simulated packets come
    /// from it.
    #[arg(long, value_name = "ADDR", value_parser = client)]
    pub source: Option<std::net::IpAddr>,
    /// Run Cilium's own programs on packets that a client could send, at most N for each frontend on
    /// each device (32): proves a forwarded path when there is no client. Each proof has its
    /// control. What the runs leave in Cilium's maps is taken back, but for its counters.
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        // `simulate::USUAL_PACKETS`
        default_missing_value = "32",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(simulate::MOST_PACKETS))
    )]
    pub simulate: Option<u32>,
    /// Watch real packets for a while (10s; such as 500ms, 2m), and say what they prove: a path that
    /// was seen has the grade `observed`. Something has to connect meanwhile. Ctrl-C ends it early,
    /// with the answer so far. Exit code 3 if no connection came.
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        value_parser = duration
    )]
    #[allow(clippy::option_option, reason = "how clap says: not there, without a value, with one")]
    pub trace: Option<Option<Duration>>,
    #[command(flatten)]
    pub inject: Proving,
    #[command(flatten)]
    pub watch: Watch,
    #[command(flatten)]
    pub expect: Expect,
}

/// What to send.
#[derive(Debug, Args)]
pub struct Proving {
    /// Let one real packet for each frontend arrive on each device, as if a client had sent it, and
    /// follow it to the backend and its answer back (waited for 2s, or so long): the grade is
    /// `observed`, without a client. TCP: a SYN, reset when the backend has accepted it. Each has
    /// its control. Asks before it sends. What the packets leave is taken back.
    #[arg(
        long,
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        value_parser = patience
    )]
    #[allow(clippy::option_option, reason = "how clap says: not there, without a value, with one")]
    pub inject: Option<Option<Duration>>,
    /// All three grades of proof in this order: programmed, simulated (`--simulate`), injected
    /// (`--inject`). Stops at the first conflict: nothing is sent where a simulation contradicts
    /// what is programmed.
    #[arg(long)]
    pub prove: bool,
    /// Injection: show what would be sent, and send nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Injection: do not ask.
    #[arg(long)]
    pub yes: bool,
    /// Injection: what UDP datagrams say: `dns`, `hex:DIGITS` or `text:WORDS`.
    #[arg(long, value_name = "PAYLOAD", value_parser = payload)]
    pub payload: Option<Payload>,
}

/// What a datagram says.
#[derive(Debug, Clone)]
pub struct Payload(pub Vec<u8>);

fn payload(text: &str) -> Result<Payload, String> {
    inject::payload(text).map(Payload)
}

impl Proving {
    /// Whether anything is to be injected.
    pub fn is_wanted(&self) -> bool {
        self.inject.is_some() || self.prove
    }

    /// The first of the arguments that only say how, as it is typed.
    pub fn given(&self) -> Option<&'static str> {
        [(self.dry_run, "--dry-run"), (self.yes, "--yes"), (self.payload.is_some(), "--payload")]
            .into_iter()
            .find_map(|(is, name)| is.then_some(name))
    }
}

/// Reads how long an answer is waited for.
fn patience(text: &str) -> Result<Duration, String> {
    /// Shorter than a backend elsewhere may take, nothing could be said of silence.
    const LEAST: Duration = Duration::from_secs(1);
    const MOST: Duration = Duration::from_mins(1);
    match duration(text)? {
        time if time < LEAST || time > MOST => Err("give 1s to 1m".to_owned()),
        time => Ok(time),
    }
}

/// Arguments of `trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// ADDR, ADDR:PORT or ADDR:PORT/PROTO; IPv6 with a port in brackets. Without it, every
    /// `LoadBalancer` address of this node.
    #[arg(value_name = "ADDR[:PORT[/PROTO]]")]
    pub vip: Option<VipQuery>,
    /// For so long: 30s, 2m.
    #[arg(long = "for", value_name = "DURATION", value_parser = duration)]
    pub duration: Option<Duration>,
    /// Only packets that arrive on these devices, instead of all from which clients' can come.
    #[arg(long, value_name = "DEV", value_delimiter = ',', value_parser = device)]
    pub via: Vec<String>,
    /// Only packets of the client with this address.
    #[arg(long, value_name = "ADDR", value_parser = client)]
    pub source: Option<std::net::IpAddr>,
    #[command(flatten)]
    pub watch: Watch,
}

/// How long, and what meanwhile.
#[derive(Debug, Args)]
pub struct Watch {
    /// Tracing: stop after the first N connections.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Tracing: write `ready` to this open file descriptor, and close it, when every hook is live.
    #[arg(long, value_name = "FD")]
    pub ready_fd: Option<i32>,
    /// Tracing: make this file, which must not be there yet, when every hook is live.
    #[arg(long, value_name = "FILE")]
    pub ready_file: Option<PathBuf>,
    /// Tracing: write what was seen of each connection to this file, as pcapng: headers alone, one
    /// interface for each hook, what the connection proves as comment.
    #[arg(long, value_name = "FILE")]
    pub pcap: Option<PathBuf>,
    /// Tracing: run this command when every hook is live, in the network namespace in which this
    /// was started, and stop when it has ended. What it prints goes to standard error.
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

impl Watch {
    /// The first of these arguments that was given, as it is typed.
    pub fn given(&self) -> Option<&'static str> {
        [
            (self.count.is_some(), "--count"),
            (self.ready_fd.is_some(), "--ready-fd"),
            (self.ready_file.is_some(), "--ready-file"),
            (self.pcap.is_some(), "--pcap"),
            (!self.command.is_empty(), "-- COMMAND"),
        ]
        .into_iter()
        .find_map(|(is, name)| is.then_some(name))
    }
}

/// Reads how long something is to take.
fn duration(text: &str) -> Result<Duration, String> {
    /// Longer than anybody waits; beyond it, the clock would come to its end.
    const MOST: Duration = Duration::from_hours(24 * 365);
    match humantime::parse_duration(text) {
        Ok(Duration::ZERO) => Err("nothing is seen in no time: give a duration such as 10s".into()),
        Ok(time) if time > MOST => Err("that is more than a year: give less".into()),
        Ok(time) => Ok(time),
        Err(error) => Err(format!("{error}: give a duration such as 500ms, 10s or 2m")),
    }
}

/// The name of a device.
fn device(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() {
        return Err("a device's name is empty: give names such as eno1,wg0".to_owned());
    }
    Ok(name.to_owned())
}

/// An address that a client can have.
fn client(text: &str) -> Result<std::net::IpAddr, String> {
    let address: std::net::IpAddr = text.parse().map_err(|_| "this is no IP address".to_owned())?;
    let broadcast = std::net::IpAddr::V4(std::net::Ipv4Addr::BROADCAST);
    if address.is_unspecified()
        || address.is_loopback()
        || address.is_multicast()
        || address == broadcast
    {
        return Err("no client has this address".to_owned());
    }
    Ok(address)
}

/// Arguments of `datapath`.
#[derive(Debug, Args)]
pub struct DatapathArgs {
    /// Show the socket hooks that are in force for this process too.
    #[arg(long)]
    pub pid: Option<u32>,
}

/// Expectations.
#[derive(Debug, Args)]
pub struct Expect {
    /// A claim that must hold: exit 0 if every claim does, 1 if one does not, 3 if one cannot be
    /// told. Repeatable: served, not-served, programmed, has-backend, announced[@DEV],
    /// not-announced, no-errors, simulated[@DEV], observed[@DEV], an outcome such as
    /// dnat-before-neigh[@DEV], finding:ID, no-finding:ID. Of several nodes each is held against
    /// every node, but for what clients see of all of them together: served, not-served, announced,
    /// not-announced, finding:ID.
    #[arg(long = "expect", value_name = "CLAIM")]
    pub claims: Vec<Expectation>,
}

/// What can be done with evidence.
#[derive(Debug, Subcommand)]
pub enum EvidenceCommand {
    /// Say what a file holds.
    Show {
        /// The file; `-` is standard input.
        file: PathBuf,
    },
    /// Judge again the question that a file was collected for.
    Judge {
        /// The file; `-` is standard input.
        file: PathBuf,
        #[command(flatten)]
        expect: Expect,
    },
    /// Sign files with a secret key of minisign's: FILE.minisig is written beside each.
    Sign {
        /// The files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// File with the secret key, as `minisign -G` makes it; the password of an encrypted one is
        /// asked for.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },
    /// Check that a file is complete and unchanged, and who signed it.
    Verify {
        /// Check FILE.minisig too, with this public key: a file of minisign's, or the key itself.
        #[arg(long, value_name = "FILE|KEY")]
        public_key: Option<String>,
        /// The files.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Say what differs between two files, in the words of the domain, by VIP and path.
    ///
    /// Exit codes: 0 nothing, 1 something, 2 a file cannot be read.
    Diff {
        /// The earlier one; `-` is standard input.
        before: PathBuf,
        /// The later one.
        after: PathBuf,
        /// What to leave out: verdict, services, announcement, programs, devices, neighbours,
        /// node, ids, counters, times, or none.
        #[arg(
            long,
            value_name = "CLASS",
            value_delimiter = ',',
            default_value = "ids,counters,times"
        )]
        ignore: Vec<String>,
    },
    /// Judge the evidence of several nodes together: who announces a VIP, and whether they can
    /// serve it.
    Merge {
        /// The files, each with one document or several; `-` is standard input, such as what
        /// `kubectl logs` prints.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// What the answer is held against.
        #[command(flatten)]
        expect: Expect,
    },
    /// Print the JSON Schema of evidence files.
    Schema,
}

/// Form of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people.
    Table,
    /// For programs: real fields.
    Json,
    /// For documents.
    Markdown,
    /// For CI: `JUnit` XML.
    Junit,
    /// For CI: workflow commands that GitHub and Gitea show beside a change.
    Github,
    /// For code review: SARIF 2.1.0 (`lint`).
    Sarif,
    /// A page for a browser, self-contained.
    Html,
    /// The picture of the packet's way, for a document.
    Svg,
    /// The evidence itself, in one line (`vip`, `check`): what `evidence merge` reads.
    Evidence,
}

/// What to mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mask {
    /// The addresses of clients.
    Clients,
}

/// When to colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum When {
    /// On a terminal, unless `NO_COLOR` is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What every command takes.
#[derive(Debug, Args)]
pub struct Common {
    /// Form of the output.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Read this evidence file instead of the node; needs no root. `-` is standard input. Given
    /// several times (`vip`): one for each node, judged together.
    #[arg(long, global = true, value_name = "FILE")]
    from: Vec<PathBuf>,
    /// Replace the addresses of clients in the evidence that is saved or printed; the verdict stays.
    #[arg(long, global = true, value_enum, value_name = "WHAT")]
    mask: Option<Mask>,
    /// Save the evidence to this file.
    #[arg(long, global = true, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Mount point of the BPF file system that holds Cilium's pins, instead of the one found;
    /// `INSPECT_BPFFS` in the environment says the same.
    #[arg(long, global = true, value_name = "PATH")]
    bpffs: Option<PathBuf>,
    /// Network namespace to look at, instead of the one in which this is started: a path, a name
    /// that `ip netns list` shows, or the id of a process in it.
    #[arg(long, global = true, value_name = "PATH|NAME|PID")]
    netns: Option<Netns>,
    /// When to colour.
    #[arg(long, global = true, value_enum, default_value_t = When::Auto, value_name = "WHEN")]
    color: When,
    /// Say less: only the verdict, no warnings.
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    quiet: bool,
    /// Say more: notes in full, what was not measured, and why.
    #[arg(short, long, global = true)]
    verbose: bool,
}

/// The common arguments as they are meant.
#[derive(Debug)]
pub struct Resolved {
    /// Form of the output.
    pub format: Format,
    /// Where the evidence comes from.
    pub from: Option<PathBuf>,
    /// Files of several nodes, where more than one was named; `from` is the first of them.
    pub nodes: Vec<PathBuf>,
    /// What to mask in evidence that leaves.
    pub mask: Option<Mask>,
    /// Where to save it.
    pub save: Option<PathBuf>,
    /// BPF file system to read.
    pub bpffs: Option<PathBuf>,
    /// Network namespace to look at.
    pub netns: Option<Netns>,
    /// Whether to colour.
    pub color: bool,
    /// Say less.
    pub quiet: bool,
    /// Say more.
    pub verbose: bool,
}

impl Resolved {
    /// Settles what depends on the environment.
    pub fn new(common: Common) -> anyhow::Result<Self> {
        let Common { output, from, mask, save, bpffs, netns, color, quiet, verbose } = common;
        if save.as_deref().is_some_and(|path| path.as_os_str() == "-") {
            anyhow::bail!("--save takes a file: standard output is for the answer");
        }
        let nodes = if from.len() > 1 { from.clone() } else { Vec::new() };
        let from = from.into_iter().next();
        let color = match color {
            When::Always => true,
            When::Never => false,
            When::Auto => {
                std::io::stdout().is_terminal()
                    && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            }
        };
        // An empty variable is none.
        let bpffs = bpffs.or_else(|| {
            let path = std::env::var_os("INSPECT_BPFFS").map(PathBuf::from);
            path.filter(|path| !path.as_os_str().is_empty())
        });
        Ok(Self { format: output, from, nodes, mask, save, bpffs, netns, color, quiet, verbose })
    }
}
