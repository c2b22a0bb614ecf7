//! For which processor an ELF binary is, and which loader it names. Bytes in, answers out; no length in them is trusted.
//!
//! The fields are those of the System V ABI, "Object files": the header, and the table of program headers.

/// `e_machine` of the processors that there are names for here, the name, and Rust's (`std::env::consts::ARCH`).
const MACHINES: [(u16, &str, &str); 9] = [
    (3, "32-bit x86", "x86"),
    (8, "MIPS", "mips"),
    (20, "32-bit PowerPC", "powerpc"),
    (21, "64-bit PowerPC", "powerpc64"),
    (22, "s390x", "s390x"),
    (40, "32-bit ARM", "arm"),
    (62, "x86-64", "x86_64"),
    (183, "64-bit ARM", "aarch64"),
    (243, "RISC-V", "riscv64"),
];
/// The types of the program headers that name a part of the file to load, and the loader.
const LOAD: u64 = 1;
const INTERPRETER: u64 = 3;

/// An ELF file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Binary<'a> {
    head: &'a [u8],
    length: u64,
}

/// Whether this processor executes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    Native,
    /// For this other one.
    Foreign(String),
    /// It is cut off, or no binary at all.
    Damaged,
}

impl Fit {
    /// What to do if the kernel does not execute it.
    pub(super) fn remedy(&self) -> String {
        match self {
            Self::Foreign(machine) => format!(
                "it is built for {machine}, and this processor is {}: build it for this one, or take the image for it (`--platform`)",
                own_name()
            ),
            Self::Native | Self::Damaged => {
                "the binary is cut off or damaged: copy or build it again".to_owned()
            }
        }
    }
}

fn own_name() -> &'static str {
    let own = std::env::consts::ARCH;
    MACHINES.iter().find(|(_, _, rust)| *rust == own).map_or(own, |(_, name, _)| name)
}

impl<'a> Binary<'a> {
    /// None if it is something else. `head` is the beginning of a file of `length` bytes.
    pub(super) fn of(head: &'a [u8], length: u64) -> Option<Self> {
        head.starts_with(b"\x7fELF").then_some(Self { head, length })
    }

    fn is_wide(&self) -> bool {
        self.head.get(4) == Some(&2)
    }

    /// The `size` bytes at `offset` as a number, in the file's order.
    fn number(&self, offset: usize, size: usize) -> Option<u64> {
        let bytes = self.head.get(offset..offset.checked_add(size)?)?;
        let add = |number: u64, byte: &u8| number << 8 | u64::from(*byte);
        Some(match self.head.get(5) {
            Some(2) => bytes.iter().fold(0, add),
            _ => bytes.iter().rev().fold(0, add),
        })
    }

    /// Where the table of program headers is, the size of each, and their number.
    fn table(&self) -> Option<(u64, u64, u64)> {
        Some(match self.is_wide() {
            true => (self.number(32, 8)?, self.number(54, 2)?, self.number(56, 2)?),
            false => (self.number(28, 4)?, self.number(42, 2)?, self.number(44, 2)?),
        })
    }

    pub(super) fn fit(&self) -> Fit {
        let (Some(machine), Some((offset, size, count))) = (self.number(18, 2), self.table()) else {
            return Fit::Damaged;
        };
        let known = MACHINES.iter().find(|(number, _, _)| u64::from(*number) == machine);
        let own = std::env::consts::ARCH;
        // A processor that has no name here may be this one.
        let is_own = known
            .map_or_else(|| MACHINES.iter().all(|(_, _, rust)| *rust != own), |(_, _, rust)| *rust == own);
        if !is_own {
            let name = known
                .map_or_else(|| format!("another processor ({machine})"), |(_, name, _)| (*name).to_owned());
            return Fit::Foreign(name);
        }
        let table = size.checked_mul(count).and_then(|bytes| bytes.checked_add(offset));
        let is_whole = |end: Option<u64>| end.is_some_and(|end| end <= self.length);
        // The kernel takes one whose parts are cut off, which then dies of a signal.
        let parts =
            self.parts(LOAD).all(|(place, length)| length == 0 || is_whole(place.checked_add(length)));
        if count > 0 && is_whole(table) && parts { Fit::Native } else { Fit::Damaged }
    }

    /// Where in the file the parts of this type are, and their lengths, as far as the beginning of the file has the table.
    fn parts(&self, kind: u64) -> impl Iterator<Item = (u64, u64)> {
        let (offset, size, count) = self.table().unwrap_or_default();
        let headers = (0..count)
            .filter_map(move |index| usize::try_from(offset.checked_add(index.checked_mul(size)?)?).ok());
        let (place, length, width) = if self.is_wide() { (8, 32, 8) } else { (4, 16, 4) };
        headers.filter(move |at| self.number(*at, 4) == Some(kind)).filter_map(move |at| {
            Some((self.number(at.checked_add(place)?, width)?, self.number(at.checked_add(length)?, width)?))
        })
    }

    /// Where in the file the loader's name is, and its length, if it names one.
    pub(super) fn loader(&self) -> Option<(u64, usize)> {
        let (place, length) = self.parts(INTERPRETER).next()?;
        Some((place, usize::try_from(length).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// This test itself.
    fn own() -> (Vec<u8>, u64) {
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        (bytes[..4096].to_vec(), bytes.len() as u64)
    }

    fn fit(head: &[u8], length: u64) -> Fit {
        Binary::of(head, length).unwrap().fit()
    }

    #[test]
    fn the_processor_of_a_binary_is_named() {
        let (mut head, length) = own();
        assert_eq!(fit(&head, length), Fit::Native);
        let other = if cfg!(target_arch = "aarch64") { (62_u16, "x86-64") } else { (183, "64-bit ARM") };
        head[18..20].copy_from_slice(&other.0.to_ne_bytes());
        assert_eq!(fit(&head, length), Fit::Foreign(other.1.to_owned()));
        assert!(
            fit(&head, length).remedy().contains(&format!("built for {}, and this processor is", other.1))
        );
        // As s390x writes it.
        head[5] = 2;
        head[18..20].copy_from_slice(&22_u16.to_be_bytes());
        assert_eq!(fit(&head, length), Fit::Foreign("s390x".to_owned()));
    }

    #[test]
    fn a_binary_that_is_cut_off_is_damaged() {
        let (head, _) = own();
        for length in [4, 5, 17, 20, 63, 64, 100, 1000, 4096] {
            assert_eq!(fit(&head[..length], length as u64), Fit::Damaged, "{length}");
        }
        assert!(Binary::of(b"#!/bin/sh", 9).is_none() && Binary::of(b"", 0).is_none());
    }

    #[test]
    fn the_loader_is_found_and_no_length_is_trusted() {
        let (mut head, length) = own();
        let (place, size) = Binary::of(&head, length).unwrap().loader().unwrap();
        let name = &head[usize::try_from(place).unwrap()..][..size];
        assert!(name.starts_with(b"/lib") && name.ends_with(b"\0"), "{name:?}");
        // Whatever the table says of itself, and wherever it is cut.
        for byte in 28..64 {
            for value in [0, 0x7f, 0xff] {
                let kept = std::mem::replace(&mut head[byte], value);
                let binary = Binary::of(&head, length).unwrap();
                let _ = (binary.fit(), binary.loader());
                head[byte] = kept;
            }
        }
        for end in 0..256 {
            if let Some(binary) = Binary::of(&head[..end], end as u64) {
                let _ = (binary.fit(), binary.loader());
            }
        }
    }
}
