//! Debian's packages without touching the system: downloaded by an apt of our own and unpacked.
//!
//! The mirror, its options and its key are those that the system's apt is configured with; only
//! the suite is another. Lists, cache and package stay in a folder of ours and are removed after.
//! Where the system is no Debian, the mirror is Debian's own, and its key is taken from the package
//! with which the system vouches for it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// Suites that have had the compiler's version at some time, the most likely ones first. Backports
/// keep several versions side by side.
const SUITES: [&str; 4] = ["trixie-backports", "testing", "unstable", "bookworm-backports"];

/// Downloads `rust-src` of exactly `version` and puts its `library` folder at `library`.
pub fn download(version: &str, library: &Path) -> Result<()> {
    let mut tried = Vec::new();
    for suite in SUITES {
        let outcome = with_apt(&[suite], |apt| {
            let source = apt.rust_src(version)?;
            super::copy_library(&source, library)
        });
        match outcome {
            Ok(()) => return Ok(()),
            Err(error) => tried.push(format!("{suite}: {error:#}")),
        }
    }
    bail!("{}", tried.join(", "))
}

/// Downloads packages of this machine's suite with all that they depend on, and unpacks them at
/// `root`; what every Debian system has anyway is left out.
pub fn unpack(packages: &[&str], root: &Path) -> Result<()> {
    with_apt(&[&suite()?], |apt| put(&apt.unpack_with_dependencies(packages)?, root))
}

/// Moves a folder that is complete to its place: it appears there whole or not at all.
pub fn put(folder: &Path, place: &Path) -> Result<()> {
    process::remove_dir(place)?;
    let parent = place.parent().context("the place has no parent folder")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    fs::rename(folder, place).with_context(|| format!("cannot make {}", place.display()))
}

/// Runs `work` with an apt that knows these suites, the first one preferred, and removes what it
/// downloaded after. One at a time on this machine: the folder is the same for all.
pub fn with_apt<T>(suites: &[&str], work: impl FnOnce(&Apt) -> Result<T>) -> Result<T> {
    for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
        if !process::is_installed(tool) {
            bail!("{tool} is not installed");
        }
    }
    let tools = super::tools_dir()?;
    let _lock = super::Lock::take(&tools.join("debian.lock"), "another download")?;
    let folder = tools.join("debian");
    process::remove_dir(&folder)?;
    let outcome = Apt::new(&folder, &configured_mirror(&tools)?, suites).and_then(|apt| {
        output(apt.command("apt-get").arg("update"), "apt-get update")?;
        work(&apt)
    });
    process::remove_dir(&folder)?;
    outcome
}

/// The Debian release that this machine runs, by its code name.
fn suite() -> Result<String> {
    let file = "/etc/os-release";
    let text = fs::read_to_string(file).with_context(|| format!("cannot read {file}"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .map(|name| name.trim_matches('"').to_owned())
        .with_context(|| format!("{file} names no Debian release"))
}

/// An apt that knows some suites of one mirror and keeps everything in one folder.
pub struct Apt {
    work: PathBuf,
    options: Vec<String>,
}

impl Apt {
    fn new(work: &Path, mirror: &Mirror, suites: &[&str]) -> Result<Self> {
        for folder in ["lists/partial", "cache/archives/partial", "sources"] {
            let path = work.join(folder);
            fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        }
        let stanzas: Vec<_> = suites.iter().map(|suite| mirror.stanza(suite)).collect();
        for (file, text) in
            [("sources/debian.sources", stanzas.join("\n")), ("status", String::new())]
        {
            let path = work.join(file);
            fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        let work_text =
            work.to_str().with_context(|| format!("{} is not UTF-8", work.display()))?;
        let mut options = vec![
            format!("Dir::State::Lists={work_text}/lists"),
            format!("Dir::State::Status={work_text}/status"),
            format!("Dir::Cache={work_text}/cache"),
            "Dir::Etc::SourceList=/dev/null".to_owned(),
            format!("Dir::Etc::SourceParts={work_text}/sources"),
            // Pins are for what gets installed; they could hide the version that we look for.
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            // As root, apt would download as a user who cannot write to our folder.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Update::Error-Mode=any".to_owned(),
            "APT::Get::List-Cleanup=false".to_owned(),
            "Acquire::Languages=none".to_owned(),
        ];
        if let [preferred, _, ..] = suites {
            // Else backports, which Debian marks as not automatic, would never be taken.
            options.push(format!("APT::Default-Release={preferred}"));
        }
        Ok(Self { work: work.to_owned(), options })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.work).env("LC_ALL", "C").arg("-q");
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    /// The unpacked `library` folder of `rust-src` in `version`.
    fn rust_src(&self, version: &str) -> Result<PathBuf> {
        let madison =
            output(self.command("apt-cache").args(["madison", "rust-src"]), "apt-cache madison")?;
        let package = pick(&madison, version)
            .with_context(|| format!("no rust-src {version}, but {}", found_versions(&madison)))?;
        eprintln!("core's source: downloading Debian's rust-src {package}");
        let unpacked = self.unpack(&[&format!("rust-src={package}")])?;
        Ok(unpacked.join(format!("usr/src/rustc-{version}/library")))
    }

    /// The names of the packages that begin like this and can be had.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let names =
            output(self.command("apt-cache").args(["pkgnames", prefix]), "apt-cache pkgnames")?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// What a package cannot do without, by name; alternatives each.
    pub fn depends(&self, package: &str) -> Result<Vec<String>> {
        let depends =
            output(self.command("apt-cache").args(["depends", package]), "apt-cache depends")?;
        Ok(depends
            .lines()
            .filter_map(|line| Some(line.split_once("Depends: ")?.1.trim().to_owned()))
            .collect())
    }

    /// Downloads just these packages (`name` or `name=version`) and unpacks them in a folder of
    /// this apt's.
    pub fn unpack(&self, packages: &[&str]) -> Result<PathBuf> {
        output(self.command("apt-get").arg("download").args(packages), "apt-get download")?;
        self.unpack_all(&self.work, &[])
    }

    /// Downloads packages with all that they depend on and unpacks them in a folder of this apt's;
    /// what every Debian system has anyway is left out.
    pub fn unpack_with_dependencies(&self, packages: &[&str]) -> Result<PathBuf> {
        /// The C library has to be the system's, whose loader is used.
        const LEFT_OUT: [&str; 3] = ["libc6_", "gcc-", "libgcc-s1_"];

        // This apt takes nothing for installed, so that it fetches every library.
        let arguments = ["install", "--download-only", "--no-install-recommends", "-y"];
        output(self.command("apt-get").args(arguments).args(packages), "apt-get install")?;
        self.unpack_all(&self.work.join("cache/archives"), &LEFT_OUT)
    }

    /// Unpacks the packages in `folder`, but for those whose file's name begins like one of these.
    fn unpack_all(&self, folder: &Path, left_out: &[&str]) -> Result<PathBuf> {
        let unpacked = self.work.join("unpacked");
        process::remove_dir(&unpacked)?;
        let entries =
            fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries.filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_package =
                Path::new(&name).extension().is_some_and(|extension| extension == "deb");
            if is_package && !left_out.iter().any(|prefix| name.starts_with(prefix)) {
                let mut unpack = Command::new("dpkg-deb");
                output(unpack.arg("-x").arg(entry.path()).arg(&unpacked), "dpkg-deb -x")?;
            }
        }
        keep_links_inside(&unpacked)?;
        Ok(unpacked)
    }
}

/// Turns links that name a file from the system's root into ones that lead to the file unpacked
/// with them: a package's own `/bin/kmod` need not be on this system. Those whose target was not
/// unpacked stay.
fn keep_links_inside(root: &Path) -> Result<()> {
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", folder.display()))?;
            let (path, kind) = (entry.path(), entry.file_type().context("no file type")?);
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_symlink() {
                let target = fs::read_link(&path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                if let Some(inside) = unpacked_target(root, &folder, &target) {
                    fs::remove_file(&path)
                        .and_then(|()| symlink(inside, &path))
                        .with_context(|| format!("cannot replace {}", path.display()))?;
                }
            }
        }
    }
    Ok(())
}

/// What a link in `folder`, a folder below `root`, has to say instead of the absolute `target` to
/// lead to that file below `root`.
fn unpacked_target(root: &Path, folder: &Path, target: &Path) -> Option<PathBuf> {
    let named = target.strip_prefix("/").ok()?;
    // Packages name their files with and without `/usr`, which are one folder once installed.
    let merged =
        named.strip_prefix("usr").map_or_else(|_| Path::new("usr").join(named), Into::into);
    let there = [named.to_owned(), merged]
        .into_iter()
        .find(|path| root.join(path).symlink_metadata().is_ok())?;
    let up = folder.strip_prefix(root).ok()?.components().map(|_| "..");
    Some(up.collect::<PathBuf>().join(there))
}

/// [`process::output`] with a short name in the error: apt's command lines are long.
fn output(command: &mut Command, name: &str) -> Result<String> {
    process::output(command).map_err(|error| {
        let text = format!("{error:#}");
        let reason = text.rsplit_once("` failed: ").map_or(text.as_str(), |(_, reason)| reason);
        anyhow::anyhow!("{name}: {reason}")
    })
}

/// The Debian version in `apt-cache madison`'s output whose upstream version is `version`.
fn pick<'a>(madison: &'a str, version: &str) -> Option<&'a str> {
    versions(madison).find(|debian| {
        debian
            .strip_prefix(version)
            .is_some_and(|rest| rest.starts_with(['+', '-', '~']) || rest.is_empty())
    })
}

fn versions(madison: &str) -> impl Iterator<Item = &str> {
    madison.lines().filter_map(|line| line.split('|').nth(1)).map(str::trim)
}

fn found_versions(madison: &str) -> String {
    let found: Vec<_> = versions(madison).collect();
    if found.is_empty() { "none at all".to_owned() } else { found.join(" ") }
}

/// A Debian mirror as apt is configured with it.
#[derive(Debug, PartialEq, Eq)]
struct Mirror {
    uri: String,
    /// The value of `Signed-By`, further lines included (a key may stand there itself).
    signed_by: Option<String>,
}

impl Mirror {
    /// A `.sources` stanza for another suite of this mirror.
    fn stanza(&self, suite: &str) -> String {
        let mut text =
            format!("Types: deb\nURIs: {}\nSuites: {suite}\nComponents: main\n", self.uri);
        if let Some(key) = &self.signed_by {
            text.push_str("Signed-By:");
            text.push_str(if key.starts_with('\n') { "" } else { " " });
            text.push_str(key);
            text.push('\n');
        }
        text
    }

    /// Whether this is Debian's main archive, which has every suite.
    fn is_main_archive(&self) -> bool {
        let uri = self.uri.trim_end_matches('/');
        uri.ends_with("/debian") || uri.ends_with("/debian.list")
    }
}

/// The first mirror of Debian's main archive in apt's configuration, else Debian's own.
fn configured_mirror(tools: &Path) -> Result<Mirror> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut found: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        found.sort();
        files.append(&mut found);
    }
    for file in files {
        let parse = match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => parse_list,
            Some("sources") => parse_sources,
            _ => continue,
        };
        let text = match fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", file.display()));
            }
        };
        if let Some(mirror) = parse(&text).into_iter().find(Mirror::is_main_archive) {
            return Ok(mirror);
        }
    }
    let signed_by = Some(keyring(tools)?);
    Ok(Mirror { uri: "http://deb.debian.org/debian".to_owned(), signed_by })
}

/// The file with the keys of Debian's archive: the system's, else that of the package which other
/// distributions have for this purpose, as the system's own apt vouches for it.
fn keyring(tools: &Path) -> Result<String> {
    const FILE: &str = "usr/share/keyrings/debian-archive-keyring.gpg";
    let own = tools.join("debian-archive-keyring");
    if let Some(file) =
        [Path::new("/"), &own].map(|root| root.join(FILE)).iter().find(|file| file.is_file())
    {
        return Ok(file.display().to_string());
    }
    let work = tools.join("debian-archive-keyring.partial");
    process::remove_dir(&work)?;
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let mut download = Command::new("apt-get");
    download.current_dir(&work).args(["-q", "-o", "APT::Sandbox::User=root"]);
    output(download.args(["download", "debian-archive-keyring"]), "apt-get download").context(
        "the keys of Debian's archive cannot be had: install the package debian-archive-keyring",
    )?;
    for entry in fs::read_dir(&work).context("the download")?.filter_map(Result::ok) {
        let mut unpack = Command::new("dpkg-deb");
        output(unpack.arg("-x").arg(entry.path()).arg(work.join("root")), "dpkg-deb -x")?;
    }
    put(&work.join("root"), &own)?;
    process::remove_dir(&work)?;
    Ok(own.join(FILE).display().to_string())
}

/// The mirrors of a file in apt's one-line format.
fn parse_list(text: &str) -> Vec<Mirror> {
    text.lines()
        .filter_map(|line| {
            let line = line.split('#').next().unwrap_or_default().trim();
            let rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
            let (options, rest) = match rest.strip_prefix('[') {
                Some(rest) => rest.split_once(']')?,
                None => ("", rest),
            };
            let signed_by = options
                .split_whitespace()
                .find_map(|option| option.strip_prefix("signed-by="))
                .map(|key| key.replace(',', " "));
            Some(Mirror { uri: rest.split_whitespace().next()?.to_owned(), signed_by })
        })
        .collect()
}

/// The mirrors of a file in apt's stanza format (deb822).
fn parse_sources(text: &str) -> Vec<Mirror> {
    // Comments may stand between the lines of a stanza: they go before the blank lines count.
    let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines
        .split(|line| line.trim().is_empty())
        .flat_map(|stanza| {
            let is_enabled = field(stanza, "Enabled").is_none_or(|value| value.trim() != "no");
            let is_binary = field(stanza, "Types")
                .is_some_and(|value| value.split_whitespace().any(|kind| kind == "deb"));
            let uris = field(stanza, "URIs").filter(|_| is_enabled && is_binary);
            let signed_by = field(stanza, "Signed-By");
            uris.unwrap_or_default()
                .split_whitespace()
                .map(|uri| Mirror { uri: uri.to_owned(), signed_by: signed_by.clone() })
                .collect::<Vec<_>>()
        })
        .collect()
}

/// The value of a field in a stanza, with its continuation lines.
fn field(stanza: &[&str], name: &str) -> Option<String> {
    let mut lines = stanza.iter().skip_while(|line| {
        line.split_once(':').is_none_or(|(key, _)| !key.eq_ignore_ascii_case(name))
    });
    let (_, first) = lines.next()?.split_once(':')?;
    let mut value = first.trim().to_owned();
    for line in lines.take_while(|line| line.starts_with([' ', '\t'])) {
        value.push('\n');
        value.push_str(line);
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stanza_file_as_debian_ships_it() {
        let text = "Types: deb\n# a comment\nURIs: http://mirror.example/debian\n\
                    Suites: bookworm bookworm-updates\nComponents: main\n\
                    Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n\
                    Types: deb\nURIs: http://mirror.example/debian-security\n\
                    Suites: bookworm-security\nComponents: main\n";
        let mirrors = parse_sources(text);
        assert_eq!(mirrors.len(), 2);
        assert!(mirrors[0].is_main_archive());
        assert!(!mirrors[1].is_main_archive());
        assert_eq!(
            mirrors[0].stanza("trixie-backports"),
            "Types: deb\nURIs: http://mirror.example/debian\nSuites: trixie-backports\n\
             Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        );
    }

    #[test]
    fn key_in_the_stanza_itself_is_kept() {
        let text = "Types: deb\nURIs: https://mirror.example/debian/\nSuites: trixie\n\
                    Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==\n";
        let mirrors = parse_sources(text);
        let stanza = mirrors[0].stanza("testing");
        assert!(
            stanza.ends_with("Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n mQ==\n"),
            "{stanza}"
        );
    }

    #[test]
    fn disabled_and_source_stanzas_are_left_out() {
        let text = "Types: deb-src\nURIs: http://a.example/debian\n\n\
                    Enabled: no\nTypes: deb\nURIs: http://b.example/debian\n";
        assert!(parse_sources(text).is_empty());
    }

    #[test]
    fn one_line_file() {
        let text = "# deb http://old.example/debian bookworm main\n\
                    deb-src http://src.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main\n\
                    deb http://other.example/debian bookworm main # ours\n";
        assert_eq!(
            parse_list(text),
            [
                Mirror {
                    uri: "http://mirror.example/debian".to_owned(),
                    signed_by: Some("/k.gpg".to_owned())
                },
                Mirror { uri: "http://other.example/debian".to_owned(), signed_by: None },
            ]
        );
    }

    #[test]
    fn links_lead_to_what_was_unpacked_with_them() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for folder in ["bin", "sbin", "usr/bin"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        fs::write(at("bin/kmod"), "kmod").unwrap();
        fs::write(at("usr/bin/xz"), "xz").unwrap();
        let links = [
            ("sbin/depmod", "/bin/kmod", "../bin/kmod"),
            ("usr/bin/lsmod", "/usr/bin/kmod", "../../bin/kmod"),
            ("bin/unxz", "/bin/xz", "../usr/bin/xz"),
            ("bin/modinfo", "kmod", "kmod"),
            ("bin/elsewhere", "/etc/alternatives/elsewhere", "/etc/alternatives/elsewhere"),
        ];
        for (link, target, _) in links {
            symlink(target, at(link)).unwrap();
        }
        keep_links_inside(root.path()).unwrap();
        for (link, _, target) in links {
            assert_eq!(fs::read_link(at(link)).unwrap(), Path::new(target), "{link}");
        }
        assert_eq!(fs::read(at("sbin/depmod")).unwrap(), b"kmod");
    }

    #[test]
    fn only_exactly_the_compilers_version_is_picked() {
        let madison = " rust-src | 1.96.0+dfsg1-1~bpo13+1 | http://m trixie-backports/main amd64 Packages\n \
                       rust-src | 1.95.0+dfsg1-2~bpo13+1 | http://m trixie-backports/main amd64 Packages\n";
        assert_eq!(pick(madison, "1.95.0"), Some("1.95.0+dfsg1-2~bpo13+1"));
        assert_eq!(pick(madison, "1.9"), None);
        assert_eq!(pick(madison, "1.94.0"), None);
        assert_eq!(pick("", "1.95.0"), None);
    }
}
