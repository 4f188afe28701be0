//! Archives in the newc format, which the kernel unpacks into its initial root file system (Linux,
//! *Documentation/driver-api/early-userspace/buffer-format.rst*).

/// The bits of a mode that give the type of a file (`S_IFDIR`, `S_IFREG`, `S_IFCHR`).
const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER: u32 = 0o020_000;

/// An archive under construction. Owner, group and time stamps are zero.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    inodes: u32,
}

impl Archive {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a directory that everybody may read. Parents must be added before their children.
    pub(crate) fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file with its content. The content must be less than 4 GiB, since the format has
    /// 32-bit sizes; every caller's cap ensures that.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a character device.
    pub(crate) fn character_device(
        &mut self,
        path: &str,
        permissions: u32,
        major: u32,
        minor: u32,
    ) {
        self.entry(path, CHARACTER | permissions, (major, minor), &[]);
    }

    /// Ends the archive and returns its bytes.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        debug_assert!(!path.starts_with('/'), "archives hold relative paths");
        self.inodes += 1;
        let links = if mode & 0o170_000 == DIRECTORY { 2 } else { 1 };
        let size = content.len() as u32;
        let path_size = path.len() as u32 + 1;
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
        // namesize, check.
        let (major, minor) = device;
        let fields = [self.inodes, mode, 0, 0, links, 0, size, 0, 0, major, minor, path_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    /// Pads to a multiple of four bytes, at which headers and contents begin.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_archive_is_its_trailer() {
        let bytes = Archive::new().finish();
        assert_eq!(bytes.len(), 124);
        assert!(bytes.starts_with(b"07070100000001"));
        assert!(bytes.ends_with(b"TRAILER!!!\0\0\0\0"));
    }

    #[test]
    fn contents_are_padded_and_sized() {
        let mut archive = Archive::new();
        archive.file("a", 0o644, b"12345");
        let bytes = archive.finish();
        // Header 110, name 2, content 5, padding 3.
        assert_eq!(&bytes[54..62], b"00000005");
        assert_eq!(&bytes[112..120], b"12345\0\0\0");
        assert_eq!(&bytes[120..126], b"070701");
    }
}
