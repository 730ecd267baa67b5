//! Runs `inspect` and says precisely what came of it; surroundings that tests need.

#![allow(dead_code, reason = "each test binary uses its part")]

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use inspector::{
    cilium::layout::{self, LAYOUTS, Layout},
    sys::mounts,
};
use inspector_lab::{
    Capture, Lab, Ns,
    capture::{CapturedMap, MapSpec, encode_hex},
    maps,
};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::{NamedTempFile, TempDir};

/// What a run came to.
#[derive(Debug)]
pub struct Ran {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// A run of `inspect`; it finds nothing of the machine's own Cilium by accident.
pub fn inspect<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inspect"));
    command.args(arguments).env_remove("INSPECT_BPFFS").env_remove("NO_COLOR").stdin(Stdio::null());
    command
}

/// A run of `inspect` on the maps of a lab.
pub fn on(lab: &Lab, arguments: &[&str]) -> Ran {
    let mut command = inspect(arguments);
    // A lab without a network has no place of its own.
    if lab.netns(Ns::Node).is_ok() {
        run(lab.exec_in(Ns::Node, &mut command).expect("the node"))
    } else {
        run(command.env("INSPECT_BPFFS", lab.bpffs()))
    }
}

/// A question about a VIP, answered from a lab's maps alone: the programs and the network of the
/// machine that the test runs on are taken out of the evidence.
pub fn maps_alone(lab: &Lab, arguments: &[&str]) -> Ran {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("evidence.json");
    let path = path.to_str().expect("UTF-8");
    let live = on(lab, &[&arguments[..2], &["--save", path]].concat());
    assert!(live.code != Some(2) && live.err.is_empty(), "{live:?}");
    let text = fs::read(path).expect("the evidence");
    fs::write(path, without_programs(&text)).expect("a file");
    run(&mut inspect([arguments, &["--from", path]].concat()))
}

/// Evidence as it would be if only maps had been read.
pub fn without_programs(text: &[u8]) -> Vec<u8> {
    let mut content: Value = serde_json::from_slice(text).expect("JSON");
    let members = content.as_object_mut().expect("an object");
    for part in ["attachments", "network", "verdict"] {
        members.remove(part);
    }
    sealed(content)
}

/// Runs a command to its end. That it panicked is no result.
pub fn run(command: &mut Command) -> Ran {
    let output = command.output().expect("the program runs");
    let ran = Ran {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("UTF-8 on standard output"),
        err: String::from_utf8(output.stderr).expect("UTF-8 on standard error"),
    };
    assert!(!ran.err.contains("panicked"), "{command:?}: {ran:?}");
    assert!(ran.code.is_some_and(|code| code <= 3), "{command:?}: {ran:?}");
    ran
}

impl Ran {
    /// Checks that there was no answer but this exit code and one sentence with these words.
    #[track_caller]
    pub fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.out, "", "something like an answer: {self:?}");
        let lines: Vec<&str> = self.err.lines().collect();
        assert_eq!(lines.len(), 1, "not one sentence: {self:?}");
        assert!(lines[0].starts_with("inspect: "), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no `{word}` in {self:?}");
        }
    }

    /// Checks that the arguments were refused with these words.
    #[track_caller]
    pub fn usage(&self, words: &[&str]) {
        assert_eq!(self.code, Some(2), "{self:?}");
        assert_eq!(self.out, "", "something like an answer: {self:?}");
        assert!(self.err.starts_with("error: ") || self.err.starts_with("inspect: "), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no `{word}` in {self:?}");
        }
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The findings as `(id, severity, seen)`.
    #[track_caller]
    pub fn findings(&self) -> Vec<(String, String, String)> {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        self.json()["verdict"]["findings"]
            .as_array()
            .expect("findings")
            .iter()
            .map(|one| (text(&one["id"]), text(&one["severity"]), text(&one["seen"])))
            .collect()
    }

    /// What was seen of a finding, each time that it was found.
    #[track_caller]
    pub fn seen(&self, id: &str) -> Vec<String> {
        self.findings().into_iter().filter(|one| one.0 == id).map(|one| one.2).collect()
    }
}

/// Copies a program to where it can be run at once. Another process writes it: a descriptor of
/// this one may live on in a child that another test starts meanwhile, and a file that is open for
/// writing cannot be run (`ETXTBSY`).
pub fn install(from: &Path, to: &Path) {
    let status = Command::new("install").args(["-m", "755"]).args([from, to]).status();
    assert!(status.expect("install, of coreutils").success(), "{}", to.display());
}

/// Writes a script to where it can be run at once, as [`install`] does.
pub fn script(path: &Path, text: &str) {
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(text.as_bytes()).expect("a file");
    install(file.path(), path);
}

/// The program where every user can run it, and room for files of theirs.
pub struct Stranger {
    folder: TempDir,
}

/// Neither root nor anybody who owns a file.
const NOBODY: u32 = 65534;

impl Stranger {
    pub fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
        install(Path::new(env!("CARGO_BIN_EXE_inspect")), &folder.path().join("inspect"));
        Self { folder }
    }

    /// A path that they can reach and not write to.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A path of a file that they may read: whoever shares evidence says so before it is saved.
    pub fn shared(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, "").expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("chmod");
        path
    }

    /// A run of `inspect` as this user, without any privilege.
    pub fn inspect(&self, arguments: &[&str]) -> Command {
        assert!(nix::unistd::geteuid().is_root(), "this test needs root, to become another user");
        let mut command = Command::new(self.path("inspect"));
        command.args(arguments).env_remove("INSPECT_BPFFS").stdin(Stdio::null());
        command.uid(NOBODY).gid(NOBODY).current_dir("/");
        command
    }
}

/// Runs `work` on a thread with a mount namespace of its own, in which no BPF file system is
/// mounted. What it mounts is gone when it ends, panics included.
pub fn in_own_mounts<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let apart = || {
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)
            .expect("a mount namespace (this test needs root)");
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("private mounts");
        while let Some(there) = mounts::bpffs().expect("the mount table").pop() {
            umount2(&there.target, MntFlags::MNT_DETACH).expect("umount");
        }
        work()
    };
    thread::scope(|scope| {
        scope.spawn(apart).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Mounts a file system without a device.
pub fn mount_at(target: &Path, kind: &str, data: Option<&str>) {
    fs::create_dir_all(target).expect("mkdir");
    mount(Some("inspector-test"), target, Some(kind), MsFlags::empty(), data).expect("mount");
}

/// Mounts a BPF file system with the load balancer's maps of a capture in Cilium's place.
pub fn mount_cilium(target: &Path, capture: &Capture) {
    mount_at(target, "bpf", None);
    let globals = maps::globals(target);
    fs::create_dir_all(&globals).expect("mkdir");
    for name in LB4 {
        let map = capture.map(name).expect("a map of the capture");
        maps::load_map(map).expect("the map").pin(&globals.join(name)).expect("a pin");
    }
}

/// The maps that a question about an IPv4 VIP needs at least.
pub const LB4: [&str; 3] =
    ["cilium_lb4_services_v2", "cilium_lb4_backends_v3", "cilium_lb4_reverse_nat"];

/// What a map with this name and generation is created with.
pub fn spec_of(name: &str, generation: u8) -> MapSpec {
    let layout = layout_of(name, generation);
    MapSpec {
        map_type: layout.types[0],
        key_size: layout.key_size,
        value_size: layout.value_size,
        max_entries: 1024,
        // BPF_F_NO_PREALLOC
        flags: 1,
        name: "made_by_a_test".to_owned(),
    }
}

/// A layout of the table.
pub fn layout_of(name: &str, generation: u8) -> &'static Layout {
    assert!(layout::is_read(name), "{name}");
    LAYOUTS
        .iter()
        .find(|layout| layout.name == name && layout.generation == generation)
        .expect("a known layout")
}

/// A map of a capture of the project.
pub fn captured(capture: &str, name: &str) -> CapturedMap {
    let capture = Capture::project(capture).expect("a capture of the project");
    capture.map(name).expect("a map of the capture").clone()
}

/// An evidence file with this content: with its hash, in the form in which it is saved.
pub fn sealed(mut content: Value) -> Vec<u8> {
    content.as_object_mut().expect("an object").remove("sha256");
    let hash = Sha256::digest(serde_json::to_vec(&content).expect("JSON"));
    content["sha256"] = Value::String(encode_hex(&hash));
    let mut text = serde_json::to_vec_pretty(&content).expect("JSON");
    text.push(b'\n');
    text
}

/// Names in a folder, sorted.
pub fn names_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}
