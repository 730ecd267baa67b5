//! `cargo xtask dist`: one static binary, to be copied to a node and run there.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use sha2::{Digest as _, Sha256};

use crate::{process, setup};

/// Builds `inspect` statically, checks that it is static, and puts it in `target/dist` with its
/// SHA-256 beside it.
pub fn run() -> Result<()> {
    setup::ensure()?;
    let host = host_triple()?;
    let arch = host.split('-').next().unwrap_or_default();

    // glibc links statically from what every Debian compiler brings; a musl target would have to be
    // downloaded. Nothing that inspect does needs what static glibc lacks (name service, dlopen).
    // A target is named so that the flags are not for build scripts, which load plug-ins.
    process::run(
        process::cargo()
            .args(["build", "--release", "--package", "inspector", "--bin", "inspect"])
            .args(["--target", &host])
            .env("RUSTFLAGS", "-C target-feature=+crt-static"),
    )?;

    let built = process::target_dir().join(&host).join("release").join("inspect");
    let image = fs::read(&built).with_context(|| format!("cannot read {}", built.display()))?;
    static_or_error(&image)
        .with_context(|| format!("{} is not a static binary", built.display()))?;

    let folder = process::target_dir().join("dist");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let name = format!("inspect-{}-{arch}-linux", env!("CARGO_PKG_VERSION"));
    let path = folder.join(&name);
    // A copy that is being run cannot be written to, but can be replaced.
    if path.exists() {
        fs::remove_file(&path).with_context(|| format!("cannot replace {}", path.display()))?;
    }
    fs::copy(&built, &path).with_context(|| format!("cannot write {}", path.display()))?;

    let mut digest = String::with_capacity(64);
    for byte in Sha256::digest(&image) {
        write!(digest, "{byte:02x}").context("cannot write to a string")?;
    }
    let sum = folder.join(format!("{name}.sha256"));
    fs::write(&sum, format!("{digest}  {name}\n"))
        .with_context(|| format!("cannot write {}", sum.display()))?;

    println!("{} {} bytes sha256:{digest}", shown(&path), image.len());
    Ok(())
}

fn shown(path: &Path) -> String {
    path.strip_prefix(process::workspace()).unwrap_or(path).display().to_string()
}

fn host_triple() -> Result<String> {
    process::output(process::rustc().arg("-vV"))?
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .map(str::to_owned)
        .context("`rustc -vV` names no host")
}

const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const DT_NULL: u64 = 0;
const DT_NEEDED: u64 = 1;

/// An error if the 64-bit little-endian ELF image asks for a program interpreter or for a shared
/// library.
fn static_or_error(image: &[u8]) -> Result<()> {
    ensure!(image.starts_with(b"\x7fELF\x02\x01"), "it is no 64-bit little-endian ELF file");
    let table = usize::try_from(u64_at(image, 0x20)?)?;
    let entry_size = usize::from(u16_at(image, 0x36)?);
    let entries = usize::from(u16_at(image, 0x38)?);
    ensure!(entries > 0, "it has no program headers");
    for index in 0..entries {
        let header = table + index * entry_size;
        match u32_at(image, header)? {
            PT_INTERP => bail!("it asks for a program interpreter (PT_INTERP)"),
            PT_DYNAMIC => {
                let offset = usize::try_from(u64_at(image, header + 0x08)?)?;
                let size = usize::try_from(u64_at(image, header + 0x20)?)?;
                for entry in (offset..offset + size).step_by(16) {
                    match u64_at(image, entry)? {
                        DT_NULL => break,
                        DT_NEEDED => bail!("it asks for a shared library (DT_NEEDED)"),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn bytes_at<const N: usize>(image: &[u8], offset: usize) -> Result<[u8; N]> {
    image
        .get(offset..)
        .and_then(|rest| rest.first_chunk())
        .copied()
        .with_context(|| format!("it ends before byte {}", offset + N))
}

fn u16_at(image: &[u8], offset: usize) -> Result<u16> {
    bytes_at(image, offset).map(u16::from_le_bytes)
}

fn u32_at(image: &[u8], offset: usize) -> Result<u32> {
    bytes_at(image, offset).map(u32::from_le_bytes)
}

fn u64_at(image: &[u8], offset: usize) -> Result<u64> {
    bytes_at(image, offset).map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test's own binary is an ordinary, dynamically linked one.
    #[test]
    fn an_ordinary_binary_is_refused() {
        let image = fs::read("/proc/self/exe").expect("own binary");
        let error = static_or_error(&image).expect_err("a dynamic binary passed");
        assert!(error.to_string().contains("PT_INTERP"), "{error}");
    }

    /// One program header (`PT_DYNAMIC`) and a dynamic section of the given tags.
    fn elf(tags: &[u64]) -> Vec<u8> {
        let mut image = vec![0; 64 + 56];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        image[0x20] = 64;
        image[0x36] = 56;
        image[0x38] = 1;
        image[64] = 2;
        image[64 + 0x08] = 120;
        image[64 + 0x20] = u8::try_from(tags.len() * 16).expect("a few tags");
        for tag in tags {
            image.extend(tag.to_le_bytes());
            image.extend(0u64.to_le_bytes());
        }
        image
    }

    #[test]
    fn a_needed_library_is_found_without_an_interpreter() {
        assert!(static_or_error(&elf(&[30, 1, 0])).is_err());
        // What comes after the end mark does not count.
        static_or_error(&elf(&[30, 0, 1])).expect("static PIE");
    }

    #[test]
    fn truncated_files_are_errors() {
        let image = elf(&[30, 0]);
        for length in 0..64 + 56 {
            assert!(static_or_error(&image[..length]).is_err(), "{length} bytes passed");
        }
    }
}
