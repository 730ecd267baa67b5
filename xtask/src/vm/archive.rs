//! The archive that a kernel unpacks as its first file system: cpio in its `newc` form
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`).

/// An archive that is being written.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// A folder; those above it come first.
    pub fn folder(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// A file that can be run.
    pub fn file(&mut self, path: &str, content: &[u8]) {
        self.entry(path, 0o100_755, (0, 0), content);
    }

    /// A character device of this number.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    /// The archive, ended.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("a file below 4 GB");
        let name_size = u32::try_from(path.len() + 1).expect("a short path");
        // inode, mode, uid, gid, links, mtime, size, the disk's device, the device, name, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_ended() {
        let mut archive = Archive::default();
        archive.folder("bin");
        archive.file("bin/x", b"abcde");
        archive.device("dev/console", 5, 1);
        let bytes = archive.finish();
        assert!(bytes.len().is_multiple_of(4));
        let at = |name: &[u8]| {
            let start = bytes.windows(name.len()).position(|window| window == name);
            start.expect("the name") - 110
        };
        for name in [b"bin\0".as_slice(), b"bin/x\0", b"dev/console\0", b"TRAILER!!!\0"] {
            assert!(at(name).is_multiple_of(4));
            assert_eq!(&bytes[at(name)..at(name) + 6], b"070701");
        }
        let file = &bytes[at(b"bin/x\0")..];
        assert_eq!(&file[54..62], b"00000005");
        assert_eq!(&file[116..121], b"abcde");
    }
}
