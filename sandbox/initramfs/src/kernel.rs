//! The guest kernel: locating it, checking it, and unpacking it to the form that boots fastest.

use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::elf::Elf;
use crate::unpack::Compression;
use crate::{Error, Result};

/// The largest kernel, packed or unpacked, in bytes.
const MAX_KERNEL: usize = 256 << 20;

/// A kernel that sandboxes boot with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The kernel file: a bzImage, or an ELF file with a PVH entry.
    pub image: PathBuf,
    /// The kernel's release, as `uname -r` prints it, or `None` if it is unknown.
    pub release: Option<String>,
    /// The directory of the kernel's modules, which has `modules.builtin`. `None` means that
    /// everything that a sandbox needs is expected to be built in.
    pub modules: Option<PathBuf>,
}

impl Kernel {
    /// Finds the kernel: `given` by the user, or the one that set-up unpacked in `installed`
    /// (`vmlinuz`, `release`, `modules/`).
    ///
    /// `given` may also be such a directory. For a file, modules are searched in `modules/` beside
    /// it and in `/lib/modules` under the release that the file names.
    ///
    /// # Errors
    /// [`Error::NotInstalled`] if set-up has not run, [`Error::NoKernel`] if the file is not a
    /// bootable kernel, [`Error::File`] if it cannot be read.
    pub fn locate(given: Option<&Path>, installed: &Path) -> Result<Self> {
        match given {
            None if !installed.join("vmlinuz").exists() => {
                Err(Error::NotInstalled(installed.to_owned()))
            }
            None => Self::in_directory(installed),
            Some(path) if path.is_dir() => Self::in_directory(path),
            Some(path) => Self::of_file(path),
        }
    }

    fn in_directory(directory: &Path) -> Result<Self> {
        let mut kernel = Self::of_file(&directory.join("vmlinuz"))?;
        if let Ok(release) = fs::read_to_string(directory.join("release")) {
            kernel.release = Some(release.trim().to_owned()).filter(|r| is_release(r));
        }
        Ok(kernel)
    }

    fn of_file(path: &Path) -> Result<Self> {
        let bytes = read(path)?;
        let image =
            Image::parse(&bytes).map_err(|what| Error::NoKernel { path: path.to_owned(), what })?;
        let release = image.release().filter(|release| is_release(release));
        let beside = path.parent().map(|directory| directory.join("modules"));
        let system = release.as_deref().map(|release| Path::new("/lib/modules").join(release));
        let modules = [beside, system]
            .into_iter()
            .flatten()
            .find(|directory| directory.join("modules.builtin").is_file());
        Ok(Self { image: path.to_owned(), release, modules })
    }

    /// Returns the path of the form of this kernel that boots fastest: the ELF file inside a
    /// bzImage, unpacked into the directory `cache` if it is not there yet. The bzImage's own
    /// decompression costs 0.4 to 1 s under emulation and some 50 ms on KVM, at every boot. If the
    /// kernel has no PVH entry or an unknown compression, the kernel file itself is returned.
    ///
    /// The ELF file boots without a random base address of the kernel (KASLR), which the bzImage's
    /// own loader would have chosen. Its name tells its content, as all nodes name it.
    ///
    /// # Errors
    /// [`Error`] if the kernel cannot be read or the cache cannot be written.
    pub fn bootable(&self, cache: &Path) -> Result<PathBuf> {
        let meta =
            fs::metadata(&self.image).map_err(|source| Error::file("read", &self.image, source))?;
        // A file that was replaced or changed in any way gets another identity.
        let identity = format!(
            "{} {}:{} {} {}.{}",
            self.image.display(),
            meta.dev(),
            meta.ino(),
            meta.size(),
            meta.ctime(),
            meta.ctime_nsec()
        );
        // Unpacking takes long, so a link leads from the file to what was unpacked of it.
        let link = cache.join(format!("kernel-{}", cache::digest(identity.as_bytes())));
        if let Some(unpacked) = cache::linked(&link) {
            return Ok(unpacked);
        }
        let bytes = read(&self.image)?;
        let Ok(Image::BzImage(image)) = Image::parse(&bytes) else { return Ok(self.image.clone()) };
        let Some(elf) = image.unpack() else { return Ok(self.image.clone()) };
        let unpacked = cache::by_content(cache, "vmlinux", "elf", &elf)?;
        cache::link(&link, &unpacked)?;
        Ok(unpacked)
    }
}

/// Returns whether two boot files have the same content as far as their paths tell: the paths are
/// the same, or the files are of caches, which may be those of two nodes.
pub fn is_same_content(one: &Path, other: &Path) -> bool {
    one == other || (one.file_name() == other.file_name() && cache::is_named_by_content(one))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|source| Error::file("open", path, source))?;
    if !file.metadata().is_ok_and(|meta| meta.is_file()) {
        return Err(Error::NoKernel { path: path.to_owned(), what: "it is no regular file" });
    }
    file.take(MAX_KERNEL as u64 + 1)
        .read_to_end(&mut bytes)
        .map_err(|source| Error::file("read", path, source))?;
    if bytes.len() > MAX_KERNEL {
        return Err(Error::NoKernel { path: path.to_owned(), what: "it is larger than 256 MiB" });
    }
    Ok(bytes)
}

/// Returns whether `text` is a safe release name, since releases become parts of paths.
fn is_release(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.+~".contains(c);
    !text.is_empty() && text.len() <= 64 && !text.starts_with('.') && text.chars().all(plain)
}

/// A kernel file, by its format.
enum Image<'a> {
    BzImage(BzImage<'a>),
    Elf(&'a [u8]),
}

impl<'a> Image<'a> {
    fn parse(bytes: &'a [u8]) -> Result<Self, &'static str> {
        if let Some(image) = BzImage::parse(bytes) {
            return Ok(Self::BzImage(image));
        }
        match Elf::parse(bytes) {
            Some(elf) if elf.has_pvh_entry() => Ok(Self::Elf(bytes)),
            Some(_) => Err("an ELF file without a PVH entry"),
            None if bytes.is_empty() => Err("it is empty"),
            None => Err("neither a Linux boot header nor an ELF header"),
        }
    }

    fn release(&self) -> Option<String> {
        let text = match self {
            Self::BzImage(image) => image.version()?,
            Self::Elf(bytes) => {
                let banner = b"Linux version ";
                let at = bytes.windows(banner.len()).position(|window| window == banner)?;
                bytes.get(at + banner.len()..)?
            }
        };
        let word = text.split(|&byte| byte == b' ' || byte == 0).next()?;
        String::from_utf8(word.get(..word.len().min(65))?.to_vec()).ok()
    }
}

/// A kernel with Linux's boot header (Linux, *Documentation/arch/x86/boot.rst*).
struct BzImage<'a> {
    bytes: &'a [u8],
}

impl<'a> BzImage<'a> {
    fn parse(bytes: &'a [u8]) -> Option<Self> {
        let image = Self { bytes };
        // boot_flag, header, and a protocol version (2.08) with payload_offset and payload_length.
        let known = image.u16(0x1fe)? == 0xaa55
            && bytes.get(0x202..0x206)? == b"HdrS"
            && image.u16(0x206)? >= 0x208;
        known.then_some(image)
    }

    /// Returns the text that `kernel_version` points to: release, builder, date.
    fn version(&self) -> Option<&'a [u8]> {
        let at = usize::from(self.u16(0x20e)?);
        if at == 0 { None } else { self.bytes.get(at + 0x200..) }
    }

    /// Returns the unpacked ELF file inside. Returns `None` if it cannot be unpacked or has no PVH
    /// entry.
    fn unpack(&self) -> Option<Vec<u8>> {
        let payload = self.payload()?;
        let elf = Compression::of(payload)?.unpack(payload, MAX_KERNEL).ok()?;
        Elf::parse(&elf)?.has_pvh_entry().then_some(elf)
    }

    /// Returns the packed payload. `payload_offset` counts from the protected-mode code, which
    /// begins after the boot sector and `setup_sects` sectors.
    fn payload(&self) -> Option<&'a [u8]> {
        let sectors = match *self.bytes.get(0x1f1)? {
            0 => 4,
            sectors => usize::from(sectors),
        };
        let offset = usize::try_from(self.u32(0x248)?).ok()?;
        let length = usize::try_from(self.u32(0x24c)?).ok()?;
        let start = ((sectors + 1) * 512).checked_add(offset)?;
        self.bytes.get(start..start.checked_add(length)?)
    }

    fn u16(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.bytes.get(at..at + 2)?.try_into().ok()?))
    }

    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes.get(at..at + 4)?.try_into().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::tests::ElfFile;
    use crate::unpack::tests::lz4;

    /// Makes a bzImage with one setup sector and a payload.
    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 1024];
        bytes[0x1f1] = 1;
        bytes[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x206..0x208].copy_from_slice(&0x20fu16.to_le_bytes());
        bytes[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        bytes[0x248..0x24c].copy_from_slice(&8u32.to_le_bytes());
        bytes[0x24c..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        let version = b"6.1.0-9-cloud-amd64 (builder) #1\0";
        bytes[0x300..0x300 + version.len()].copy_from_slice(version);
        bytes.extend_from_slice(b"padding!");
        bytes.extend_from_slice(payload);
        bytes
    }

    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn locate(&self, content: &[u8]) -> Result<Kernel> {
            let path = self.0.path().join("vmlinuz");
            fs::write(&path, content).unwrap();
            Kernel::locate(Some(&path), Path::new("/nonexistent"))
        }

        fn bootable(&self, content: &[u8]) -> Vec<u8> {
            let kernel = self.locate(content).unwrap();
            fs::read(kernel.bootable(&self.0.path().join("cache")).unwrap()).unwrap()
        }
    }

    #[test]
    fn a_kernel_is_found_with_its_release_and_modules() {
        let files = Files::new();
        let kernel = files.locate(&bzimage(b"")).unwrap();
        assert_eq!(kernel.release.as_deref(), Some("6.1.0-9-cloud-amd64"));
        assert_eq!(kernel.modules, None);
        let modules = files.0.path().join("modules");
        fs::create_dir(&modules).unwrap();
        fs::write(modules.join("modules.builtin"), "").unwrap();
        assert_eq!(files.locate(&bzimage(b"")).unwrap().modules, Some(modules));
        fs::write(files.0.path().join("release"), "7.2.1+deb13\n").unwrap();
        let installed = Kernel::locate(None, files.0.path()).unwrap();
        assert_eq!(installed.release.as_deref(), Some("7.2.1+deb13"));
        assert_eq!(Kernel::locate(Some(files.0.path()), Path::new("/x")).unwrap(), installed);
    }

    #[test]
    fn a_kernel_that_is_no_kernel_is_one_clear_error() {
        let files = Files::new();
        let mut headless = bzimage(b"");
        headless[0x202] = 0;
        for (content, what) in [
            (&b""[..], "it is empty"),
            (b"#!/bin/sh\n", "neither a Linux boot header nor an ELF header"),
            (&ElfFile::program().bytes(), "an ELF file without a PVH entry"),
            (&headless, "neither a Linux boot header nor an ELF header"),
        ] {
            let error = files.locate(content).unwrap_err().to_string();
            assert!(error.contains(what) && error.lines().count() == 1, "{error}");
        }
        let absent = Kernel::locate(Some(Path::new("/nonexistent/k")), Path::new("/x"));
        assert!(matches!(absent, Err(Error::File { .. })));
        let none = Kernel::locate(None, Path::new("/nonexistent"));
        assert!(matches!(none, Err(Error::NotInstalled(_))));
        let device = Kernel::locate(Some(Path::new("/dev/zero")), Path::new("/x"));
        assert!(matches!(device, Err(Error::NoKernel { .. })));
    }

    #[test]
    fn the_elf_inside_is_what_boots() {
        let files = Files::new();
        let elf = ElfFile::kernel().bytes();
        assert_eq!(files.bootable(&bzimage(&lz4(&elf))), elf);
        assert_eq!(files.bootable(&bzimage(&zstd::encode_all(&elf[..], 3).unwrap())), elf);
        assert_eq!(files.bootable(&elf), elf);
        // A replaced file is another kernel, although the cache has the old one.
        let newer = [&elf[..], b"newer"].concat();
        assert_eq!(files.bootable(&bzimage(&lz4(&newer))), newer);
    }

    #[test]
    fn an_unpacked_kernel_has_the_same_name_on_every_node() {
        let image = bzimage(&lz4(&ElfFile::kernel().bytes()));
        let (node, other) = (Files::new(), Files::new());
        let of = |files: &Files| {
            let kernel = files.locate(&image).unwrap();
            kernel.bootable(&files.0.path().join("cache")).unwrap()
        };
        assert!(is_same_content(&of(&node), &of(&other)));
        let unpacked = of(&node);
        // It is not unpacked again, unless it was removed.
        fs::write(&unpacked, b"marked").unwrap();
        let kernel = Kernel::locate(Some(&node.0.path().join("vmlinuz")), Path::new("/x")).unwrap();
        let again = kernel.bootable(&node.0.path().join("cache")).unwrap();
        assert_eq!(fs::read(again).unwrap(), b"marked");
        fs::remove_file(&unpacked).unwrap();
        assert_eq!(of(&node), unpacked);
        assert!(unpacked.is_file());
    }

    #[test]
    fn files_are_the_same_by_path_or_by_a_name_that_tells_their_content() {
        let digest = "0123456789abcdef0123456789abcdef";
        let same = |one: &str, other: &str| is_same_content(Path::new(one), Path::new(other));
        assert!(same("/boot/vmlinuz", "/boot/vmlinuz"));
        assert!(!same("/boot/vmlinuz", "/other/vmlinuz"));
        let named = |directory: &str| format!("{directory}/vmlinux-{digest}.elf");
        assert!(same(&named("/a"), &named("/b")));
        assert!(!same(&named("/a"), &named("/b").replace('0', "1")));
        assert!(!same("/a/vmlinux-1.elf", "/b/vmlinux-1.elf"), "no digest");
    }

    #[test]
    fn what_cannot_be_unpacked_boots_as_it_is() {
        let files = Files::new();
        let program = lz4(&ElfFile::program().bytes());
        for payload in [&b""[..], b"unknown", b"\x1f\x8bdamaged", &program] {
            let image = bzimage(payload);
            assert_eq!(files.bootable(&image), image);
        }
        let mut outside = bzimage(b"x");
        outside[0x248..0x250].fill(0xff);
        assert_eq!(files.bootable(&outside), outside);
    }

    #[test]
    fn hostile_releases_do_not_become_paths() {
        for bad in ["", "..", "../x", "a/b", ".hidden", "a b", &"x".repeat(65)] {
            assert!(!is_release(bad), "{bad}");
        }
        assert!(is_release("6.12.107+deb13-cloud-amd64"));
        let mut image = bzimage(b"");
        image[0x300..0x30a].copy_from_slice(b"../../etc\0");
        assert_eq!(Files::new().locate(&image).unwrap().release, None);
    }
}
