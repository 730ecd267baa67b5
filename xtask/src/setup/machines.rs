//! What virtual machines are made of: an emulator and kernels, Debian's packages of them,
//! downloaded and unpacked beside the other tools. Nothing of it is installed.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::debian;
use crate::process;

/// Where QEMU comes from, the preferred suite first. The one of bookworm itself panics now and then
/// with Linux 6.12. Its libraries are taken along, and need a C library not older than bookworm's.
const QEMU_SUITES: [&str; 2] = ["bookworm-backports", "bookworm"];

/// QEMU, and what prepares a kernel: its modules' tools, a shell that needs no library, and what
/// kernels and modules are compressed with.
const PACKAGES: [&str; 6] =
    ["qemu-system-x86", "kmod", "busybox-static", "xz-utils", "zstd", "lz4"];

/// Where kernels come from, the oldest suite first: the first one that has a version has had it
/// longest.
const KERNEL_SUITES: [&str; 4] = ["bookworm", "bookworm-backports", "trixie", "trixie-backports"];

/// The modules that a machine needs to reach its root: those of virtio's PCI devices and serial
/// ports, the file system that is shared with the host, and the one that makes it writable.
const BOOT_MODULES: [&str; 6] =
    ["virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_rng"];

/// Below `kernel/` of a module tree, what a machine without hardware never loads.
const NO_USE: [&str; 2] = ["sound", "drivers"];
/// … but these drivers, for devices that are made of nothing but software.
const DRIVERS: [&str; 5] = ["net", "virtio", "block", "char", "vhost"];
/// … of which these are hardware again.
const NO_USE_NET: [&str; 9] =
    ["ethernet", "wireless", "can", "usb", "wwan", "phy", "dsa", "hamradio", "fddi"];

/// The programs of [`PACKAGES`].
pub struct Tools {
    root: PathBuf,
}

/// A kernel that is ready to be booted.
#[derive(Debug)]
pub struct Kernel {
    /// What `uname -r` says in it.
    pub release: String,
    folder: PathBuf,
}

impl Tools {
    /// Those that are there, else downloaded now.
    pub fn get() -> Result<Self> {
        if std::env::consts::ARCH != "x86_64" {
            bail!("virtual machines are made for x86-64 alone, and this is another processor");
        }
        let root = machines_dir()?.join("tools");
        let this = Self { root };
        let _lock = super::Lock::take(&machines_dir()?.join("lock"), "another set-up")?;
        if this.is_complete() {
            return Ok(this);
        }
        eprintln!("virtual machines: downloading QEMU (50 MB)");
        let outcome = debian::with_apt(&QEMU_SUITES, |apt| {
            debian::put(&apt.unpack_with_dependencies(&PACKAGES)?, &this.root)
        });
        outcome.context("QEMU for virtual machines cannot be had")?;
        if !this.is_complete() {
            bail!("Debian's packages for virtual machines lack a program that they should have");
        }
        Ok(this)
    }

    fn is_complete(&self) -> bool {
        ["qemu-system-x86_64", "depmod", "modprobe", "busybox", "xz", "zstd", "lz4"]
            .iter()
            .all(|name| self.path(name).is_ok())
    }

    /// Where a program is.
    pub fn path(&self, name: &str) -> Result<PathBuf> {
        ["usr/bin", "bin", "usr/sbin", "sbin"]
            .iter()
            .map(|folder| self.root.join(folder).join(name))
            .find(|path| path.is_file())
            .with_context(|| format!("there is no {name} in {}", self.root.display()))
    }

    /// The folders with the libraries that the programs were built with.
    pub fn libraries(&self) -> String {
        let folders = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        folders.map(|folder| self.root.join(folder).display().to_string()).join(":")
    }

    /// A run of a program with its own libraries.
    pub fn command(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(self.path(name)?);
        command.env("LD_LIBRARY_PATH", self.libraries());
        Ok(command)
    }

    /// A run of QEMU with its own modules and firmware.
    pub fn qemu(&self) -> Result<Command> {
        let mut command = self.command("qemu-system-x86_64")?;
        command.env("QEMU_MODULE_DIR", self.root.join("usr/lib/x86_64-linux-gnu/qemu"));
        for folder in ["qemu", "seabios"] {
            command.arg("-L").arg(self.root.join("usr/share").join(folder));
        }
        Ok(command)
    }

    /// `content` through a program that decompresses, as far as it goes.
    fn decompress(&self, name: &str, arguments: &[&str], content: &[u8]) -> Result<Vec<u8>> {
        let mut command = self.command(name)?;
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut input = child.stdin.take().context("no pipe")?;
        std::thread::scope(|scope| {
            // A program that stops reading says why itself.
            scope.spawn(move || input.write_all(content).ok());
            let output = child.wait_with_output().context("cannot wait")?;
            if !output.status.success() {
                bail!("{name}: {}", String::from_utf8_lossy(&output.stderr).trim());
            }
            Ok(output.stdout)
        })
    }
}

impl Kernel {
    /// A kernel that is there, else downloaded now: `wanted` is how its version begins (`6.1`,
    /// `6.12`, a whole release too), or `newest`. With `update` a newer one is looked for.
    pub fn get(tools: &Tools, wanted: &str, update: bool) -> Result<Self> {
        let kernels = machines_dir()?.join("kernels");
        let _lock = super::Lock::take(&machines_dir()?.join("lock"), "another set-up")?;
        if !update && let Some(kernel) = Self::cached(&kernels, wanted) {
            return Ok(kernel);
        }
        Self::download(tools, &kernels, wanted)
            .with_context(|| format!("Debian's kernel {wanted} cannot be had"))
    }

    fn cached(kernels: &Path, wanted: &str) -> Option<Self> {
        let release = if wanted == NEWEST {
            fs::read_to_string(kernels.join(NEWEST)).ok()?
        } else {
            let there = fs::read_dir(kernels).ok()?.filter_map(Result::ok);
            let names: Vec<_> =
                there.filter_map(|entry| entry.file_name().into_string().ok()).collect();
            newest_of(names.iter().map(String::as_str), wanted)?.to_owned()
        };
        let folder = kernels.join(&release);
        folder.join("vmlinux").is_file().then_some(Self { release, folder })
    }

    fn download(tools: &Tools, kernels: &Path, wanted: &str) -> Result<Self> {
        let (version, suites) = match wanted {
            NEWEST => ("", &KERNEL_SUITES[KERNEL_SUITES.len() - 1..]),
            version => (version, &KERNEL_SUITES[..]),
        };
        let mut tried = Vec::new();
        for suite in suites {
            let outcome = debian::with_apt(&[suite], |apt| {
                let names = apt.names("linux-image-")?;
                let releases = names.iter().filter_map(|name| name.strip_prefix("linux-image-"));
                let Some(release) = newest_of(releases, version) else {
                    return Ok(None);
                };
                let kernel = Self { release: release.to_owned(), folder: kernels.join(release) };
                if !kernel.folder.exists() {
                    kernel.make(tools, apt)?;
                }
                Ok(Some(kernel))
            });
            match outcome {
                Ok(Some(kernel)) => {
                    if wanted == NEWEST {
                        let note = kernels.join(NEWEST);
                        fs::write(&note, &kernel.release)
                            .with_context(|| format!("cannot write {}", note.display()))?;
                    }
                    return Ok(kernel);
                }
                Ok(None) => tried.push(format!("{suite} has no such version")),
                Err(error) => tried.push(format!("{suite}: {error:#}")),
            }
        }
        bail!("{}", tried.join(", "))
    }

    /// Downloads the packages of this release and makes its folder.
    fn make(&self, tools: &Tools, apt: &debian::Apt) -> Result<()> {
        let release = &self.release;
        let image = format!("linux-image-{release}");
        // Newer packages of the image are empty and depend on those of its parts.
        let mut packages = apt.depends(&image)?;
        packages.retain(|name| {
            ["linux-base-", "linux-binary-", "linux-modules-"]
                .iter()
                .any(|part| name.strip_prefix(part) == Some(release))
        });
        packages.push(image);
        eprintln!("virtual machines: downloading Linux {release} (up to 120 MB)");
        let packages: Vec<_> = packages.iter().map(String::as_str).collect();
        let unpacked = apt.unpack(&packages)?;

        let made = unpacked.join("made");
        let modules = made.join("lib/modules").join(release);
        let parent = modules.parent().context("no parent")?;
        fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
        let from = ["usr/lib/modules", "lib/modules"]
            .map(|folder| unpacked.join(folder).join(release))
            .into_iter()
            .find(|folder| folder.is_dir())
            .context("the package holds no modules")?;
        fs::rename(&from, &modules).context("cannot move the modules")?;
        prune(&modules.join("kernel"))?;
        process::output(tools.command("depmod")?.arg("-b").arg(&made).arg(release))?;
        self.boot_modules(tools, &made)?;

        let image =
            [unpacked.join("boot").join(format!("vmlinuz-{release}")), modules.join("vmlinuz")]
                .into_iter()
                .find(|path| path.is_file())
                .context("the packages hold no kernel")?;
        let image = fs::read(&image).with_context(|| format!("cannot read {}", image.display()))?;
        let vmlinux = vmlinux(tools, &image).context("the kernel cannot be unpacked")?;
        fs::write(made.join("vmlinux"), vmlinux).context("cannot write the kernel")?;
        debian::put(&made, &self.folder)
    }

    /// Puts the modules that are loaded before there is a root into `boot/`, decompressed, their
    /// names in the order in which they have to be loaded.
    fn boot_modules(&self, tools: &Tools, made: &Path) -> Result<()> {
        let boot = made.join("boot");
        fs::create_dir_all(&boot).with_context(|| format!("cannot make {}", boot.display()))?;
        let mut done = Vec::new();
        for module in BOOT_MODULES {
            let mut modprobe = tools.command("modprobe")?;
            modprobe.args(["--show-depends", "--set-version", &self.release, "--dirname"]);
            let lines = process::output(modprobe.arg(made).arg(module))?;
            // `insmod PATH` for each, what it depends on first; `builtin NAME` for no file.
            for path in lines.lines().filter_map(|line| line.trim().strip_prefix("insmod ")) {
                if done.iter().any(|other| other == path) {
                    continue;
                }
                let content = fs::read(path).with_context(|| format!("cannot read {path}"))?;
                let name = Path::new(path).file_name().context("a module")?.to_string_lossy();
                let (name, content) = match name.rsplit_once('.') {
                    Some((name, "xz")) => (name, tools.decompress("xz", &["-dc"], &content)?),
                    Some((name, "zst")) => (name, tools.decompress("zstd", &["-dc"], &content)?),
                    _ => (&*name, content),
                };
                let target = boot.join(format!("{:02}-{name}", done.len()));
                fs::write(&target, content)
                    .with_context(|| format!("cannot write {}", target.display()))?;
                done.push(path.to_owned());
            }
        }
        Ok(())
    }

    /// The kernel itself, an ELF file.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// What is `/lib/modules/RELEASE` in it.
    pub fn modules(&self) -> PathBuf {
        self.folder.join("lib/modules").join(&self.release)
    }

    /// The modules that are loaded before there is a root, in order.
    pub fn boot(&self) -> Result<Vec<PathBuf>> {
        let boot = self.folder.join("boot");
        let entries =
            fs::read_dir(&boot).with_context(|| format!("cannot list {}", boot.display()))?;
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.sort();
        Ok(paths)
    }
}

/// The word for the newest kernel that there is.
const NEWEST: &str = "newest";

fn machines_dir() -> Result<PathBuf> {
    Ok(super::tools_dir()?.join("machines"))
}

/// Removes modules for hardware: most of some hundred megabytes.
fn prune(kernel: &Path) -> Result<()> {
    let keep_only = |folder: &Path, is_kept: &dyn Fn(&str) -> bool| -> Result<()> {
        let entries =
            fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries.filter_map(Result::ok) {
            let path = entry.path();
            if path.is_dir() && !is_kept(&entry.file_name().to_string_lossy()) {
                process::remove_dir(&path)?;
            }
        }
        Ok(())
    };
    keep_only(kernel, &|name| name == "drivers" || !NO_USE.contains(&name))?;
    keep_only(&kernel.join("drivers"), &|name| DRIVERS.contains(&name))?;
    keep_only(&kernel.join("drivers/net"), &|name| !NO_USE_NET.contains(&name))
}

/// The newest of the releases that begin with this version and are whole kernels for any machine.
fn newest_of<'a>(releases: impl Iterator<Item = &'a str>, version: &str) -> Option<&'a str> {
    releases
        .filter(|release| {
            let Some(rest) = release.strip_suffix("-amd64") else {
                return false;
            };
            // `6.1.0-50-cloud`, `6.1.0-50-rt`: made for other ends, the first has no 9p.
            let is_plain = rest.starts_with(|first: char| first.is_ascii_digit())
                && !rest.ends_with("cloud")
                && !rest.ends_with("rt");
            let begins = release.strip_prefix(version).is_some_and(|rest| {
                version.is_empty() || !rest.starts_with(|next: char| next.is_ascii_digit())
            });
            is_plain && begins
        })
        .max_by_key(|release| numbers(release))
}

/// The numbers in a release: `6.12.90+deb12.1-amd64` is 6, 12, 90, 12, 1, 64.
fn numbers(release: &str) -> Vec<u64> {
    let release = release.strip_suffix("-amd64").unwrap_or(release);
    release
        .split(|character: char| !character.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// The kernel proper in what is made for boot loaders (`bzImage`), as an ELF file.
fn vmlinux(tools: &Tools, image: &[u8]) -> Result<Vec<u8>> {
    let payload = payload(image).context("it is no bzImage of a known form")?;
    // Behind the compressed kernel stands its size, in four bytes.
    let compressed = &payload[..payload.len().saturating_sub(4)];
    let kernel = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => {
            tools.decompress("xz", &["-dc", "--single-stream"], compressed)?
        }
        [0x28, 0xb5, 0x2f, 0xfd, ..] => tools.decompress("zstd", &["-dc"], compressed)?,
        [0x02, 0x21, 0x4c, 0x18, ..] => tools.decompress("lz4", &["-dc"], compressed)?,
        _ => bail!("it is compressed with something else than xz, zstd or lz4"),
    };
    if !kernel.starts_with(b"\x7fELF") {
        bail!("what was compressed is no ELF file");
    }
    Ok(kernel)
}

/// The compressed part of a bzImage, by its set-up header (`Documentation/arch/x86/boot.rst`).
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    (image.get(0x202..0x206)? == b"HdrS").then_some(())?;
    // 0 stands for 4, for the sake of old boot loaders.
    let sectors = match image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(*sectors),
    };
    let start = ((sectors + 1) * 512).checked_add(word(0x248)?)?;
    image.get(start..start.checked_add(word(0x24c)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_of_a_version_is_found_by_number() {
        let releases = [
            "6.1.0-9-amd64",
            "6.1.0-50-amd64",
            "6.1.0-51-cloud-amd64",
            "6.1.0-51-rt-amd64",
            "6.1.0-51-amd64-dbg",
            "6.12.90+deb12-amd64",
            "6.12.90+deb12.1-amd64",
            "6.12.9+deb12-amd64",
            "7.3.4+deb13-amd64",
            "amd64",
            "cloud-amd64",
        ];
        let find = |version| newest_of(releases.into_iter(), version);
        assert_eq!(find("6.1"), Some("6.1.0-50-amd64"));
        assert_eq!(find("6.12"), Some("6.12.90+deb12.1-amd64"));
        assert_eq!(find("6.12.9"), Some("6.12.9+deb12-amd64"));
        assert_eq!(find("6.1.0-9-amd64"), Some("6.1.0-9-amd64"));
        assert_eq!(find(""), Some("7.3.4+deb13-amd64"));
        assert_eq!(find("6"), Some("6.12.90+deb12.1-amd64"));
        assert_eq!(find("5.10"), None);
    }

    #[test]
    fn payload_is_found_by_the_header() {
        let mut image = vec![0; 0x1000];
        image[0x1f1] = 2;
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&0x10_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&3_u32.to_le_bytes());
        image[0x610..0x613].copy_from_slice(b"abc");
        assert_eq!(payload(&image), Some(b"abc".as_slice()));
        // Longer than the file.
        image[0x24c..0x250].copy_from_slice(&0xffff_u32.to_le_bytes());
        assert_eq!(payload(&image), None);
        assert_eq!(payload(b"MZ"), None);
    }
}
