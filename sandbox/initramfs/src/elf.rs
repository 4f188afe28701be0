//! The part of ELF that tells kernels, modules and programs apart (System V ABI, *Object Files*).
//! The files come from packages and users, so every offset is checked.

/// `e_machine` of x86-64.
const EM_X86_64: u16 = 62;
/// `p_type` of the segment that names a program's dynamic loader.
const PT_INTERP: u32 = 3;
/// `p_type` of notes.
const PT_NOTE: u32 = 4;
/// `XEN_ELFNOTE_PHYS32_ENTRY`: the note with the entry point of a PVH boot (Xen, *elfnote.h*).
const XEN_PHYS32_ENTRY: u32 = 18;

/// A 64-bit little-endian x86-64 ELF file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elf<'a> {
    bytes: &'a [u8],
}

/// The position of a header table in the file.
struct Table {
    offset: u64,
    entry_size: u64,
    count: u64,
}

impl<'a> Elf<'a> {
    /// Returns `None` if `bytes` are not a 64-bit little-endian x86-64 ELF file.
    pub(crate) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let elf = Self { bytes };
        // Magic, ELFCLASS64, ELFDATA2LSB, EV_CURRENT.
        let x86_64 = bytes.starts_with(b"\x7fELF\x02\x01\x01") && elf.u16(18)? == EM_X86_64;
        x86_64.then_some(elf)
    }

    /// Returns whether the program needs a dynamic loader.
    pub(crate) fn has_interpreter(self) -> bool {
        self.segments().any(|segment| self.u32(segment) == Some(PT_INTERP))
    }

    /// Returns whether a PVH boot can enter the kernel.
    pub(crate) fn has_pvh_entry(self) -> bool {
        self.segments()
            .filter(|&segment| self.u32(segment) == Some(PT_NOTE))
            .filter_map(|segment| self.slice(self.u64(segment + 8)?, self.u64(segment + 32)?))
            .any(notes_have_pvh_entry)
    }

    /// Returns the content of the section with this name. Returns `None` if there is none.
    pub(crate) fn section(self, name: &[u8]) -> Option<&'a [u8]> {
        let table = self.section_table()?;
        let names = table.offset + table.entry_size.checked_mul(self.u16(62)?.into())?;
        let names = self.slice(self.u64(names + 24)?, self.u64(names + 32)?)?;
        let header = table.entries().find(|&header| {
            let at = self.u32(header).and_then(|at| names.get(at as usize..));
            at.is_some_and(|text| text.split(|&byte| byte == 0).next() == Some(name))
        })?;
        self.slice(self.u64(header + 24)?, self.u64(header + 32)?)
    }

    fn segments(self) -> impl Iterator<Item = u64> {
        let table = || {
            let table = Table {
                offset: self.u64(32)?,
                entry_size: self.u16(54)?.into(),
                count: self.u16(56)?.into(),
            };
            table.checked(self.bytes.len(), 56)
        };
        table().into_iter().flat_map(|table| table.entries())
    }

    fn section_table(self) -> Option<Table> {
        let table = Table {
            offset: self.u64(40)?,
            entry_size: self.u16(58)?.into(),
            count: self.u16(60)?.into(),
        };
        table.checked(self.bytes.len(), 64)
    }

    fn slice(self, offset: u64, length: u64) -> Option<&'a [u8]> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(length).ok()?)?;
        self.bytes.get(start..end)
    }

    fn array<const N: usize>(self, offset: u64) -> Option<[u8; N]> {
        self.slice(offset, N as u64)?.try_into().ok()
    }

    fn u16(self, offset: u64) -> Option<u16> {
        self.array(offset).map(u16::from_le_bytes)
    }

    fn u32(self, offset: u64) -> Option<u32> {
        self.array(offset).map(u32::from_le_bytes)
    }

    fn u64(self, offset: u64) -> Option<u64> {
        self.array(offset).map(u64::from_le_bytes)
    }
}

impl Table {
    /// Returns the table if it lies within the file and its entries are at least as large as in the
    /// ABI. Then no sum of offset and index overflows.
    fn checked(self, file_size: usize, entry_size: u64) -> Option<Self> {
        let size = self.entry_size.checked_mul(self.count)?;
        let end = self.offset.checked_add(size)?;
        (self.entry_size >= entry_size && end <= file_size as u64).then_some(self)
    }

    fn entries(&self) -> impl Iterator<Item = u64> + use<> {
        let (offset, size) = (self.offset, self.entry_size);
        (0..self.count).map(move |index| offset + index * size)
    }
}

/// Returns whether a PVH entry is among these notes. A note is the size of its name, the size of
/// its content, its type, the name and the content, both padded to four bytes.
fn notes_have_pvh_entry(mut notes: &[u8]) -> bool {
    let word = |at: usize, bytes: &[u8]| -> Option<u32> {
        Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
    };
    let padded = |size: u32| (size as usize).next_multiple_of(4);
    while let (Some(name), Some(content), Some(kind)) =
        (word(0, notes), word(4, notes), word(8, notes))
    {
        if kind == XEN_PHYS32_ENTRY && notes[12..].starts_with(b"Xen\0") {
            return true;
        }
        let Some(rest) = notes.get(12 + padded(name) + padded(content)..) else { return false };
        notes = rest;
    }
    false
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A small ELF file with one segment and one section with content.
    pub(crate) struct ElfFile {
        segment: (u32, Vec<u8>),
        section: (&'static [u8], Vec<u8>),
    }

    impl ElfFile {
        pub(crate) fn program() -> Self {
            Self { segment: (1, b"code".into()), section: (b".text", Vec::new()) }
        }

        pub(crate) fn dynamic() -> Self {
            Self { segment: (PT_INTERP, b"/lib64/ld.so\0".into()), ..Self::program() }
        }

        pub(crate) fn kernel() -> Self {
            let mut notes = Vec::new();
            for (kind, content) in [(6u32, &b"linux\0\0\0"[..]), (XEN_PHYS32_ENTRY, &[0; 4])] {
                for word in [4, content.len() as u32, kind] {
                    notes.extend_from_slice(&word.to_le_bytes());
                }
                notes.extend_from_slice(b"Xen\0");
                notes.extend_from_slice(content);
            }
            Self { segment: (PT_NOTE, notes), ..Self::program() }
        }

        pub(crate) fn module(modinfo: &str) -> Self {
            Self { section: (b".modinfo", modinfo.into()), ..Self::program() }
        }

        pub(crate) fn bytes(&self) -> Vec<u8> {
            let (segment, section) = (&self.segment.1, &self.section.1);
            let names = [b"\0", self.section.0, b"\0"].concat();
            let content = 64 + 56;
            let section_at = content + segment.len();
            let names_at = section_at + section.len();
            let headers_at = names_at + names.len();
            let mut bytes = b"\x7fELF\x02\x01\x01".to_vec();
            bytes.resize(64, 0);
            bytes[18..20].copy_from_slice(&EM_X86_64.to_le_bytes());
            bytes[32..40].copy_from_slice(&64u64.to_le_bytes());
            bytes[40..48].copy_from_slice(&(headers_at as u64).to_le_bytes());
            for (at, value) in [(54, 56u16), (56, 1), (58, 64), (60, 2), (62, 1)] {
                bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
            }
            let mut header = [0u8; 56];
            header[..4].copy_from_slice(&self.segment.0.to_le_bytes());
            header[8..16].copy_from_slice(&(content as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(segment.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&header);
            bytes.extend_from_slice(segment);
            bytes.extend_from_slice(section);
            bytes.extend_from_slice(&names);
            for (name, at, size) in [(1u32, section_at, section.len()), (0, names_at, names.len())]
            {
                let mut header = [0u8; 64];
                header[..4].copy_from_slice(&name.to_le_bytes());
                header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
                header[32..40].copy_from_slice(&(size as u64).to_le_bytes());
                bytes.extend_from_slice(&header);
            }
            bytes
        }
    }

    fn facts(bytes: &[u8]) -> Option<(bool, bool, Option<Vec<u8>>)> {
        let elf = Elf::parse(bytes)?;
        let section = elf.section(b".modinfo").map(<[u8]>::to_vec);
        Some((elf.has_interpreter(), elf.has_pvh_entry(), section))
    }

    #[test]
    fn kernels_modules_and_programs_are_told_apart() {
        assert_eq!(facts(&ElfFile::program().bytes()), Some((false, false, None)));
        assert_eq!(facts(&ElfFile::dynamic().bytes()), Some((true, false, None)));
        assert_eq!(facts(&ElfFile::kernel().bytes()), Some((false, true, None)));
        let module = facts(&ElfFile::module("depends=\0").bytes());
        assert_eq!(module, Some((false, false, Some(b"depends=\0".to_vec()))));
        assert_eq!(facts(b"\x7fELF\x01\x01\x01"), None);
    }

    #[test]
    fn no_damage_panics() {
        for file in [ElfFile::kernel().bytes(), ElfFile::module("depends=a,b\0").bytes()] {
            for length in 0..file.len() {
                facts(&file[..length]);
            }
            for at in 0..file.len() {
                for value in [0, 1, 0x7f, 0x80, 0xff] {
                    let mut damaged = file.clone();
                    damaged[at..(at + 8).min(file.len())].fill(value);
                    facts(&damaged);
                }
            }
        }
    }
}
