//! FNV-1a (Fowler, Noll, Vo). Ranks use it to compare values that must be equal, and the file store to find torn
//! writes. It detects accidental differences, not those that an adversary makes. It is our own function because it is a
//! part of formats.

/// The 64-bit hash.
pub fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The 32-bit hash, which is not a part of the 64-bit one.
pub fn fnv1a_32(bytes: impl IntoIterator<Item = u8>) -> u32 {
    let step = |hash: u32, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    bytes.into_iter().fold(0x811c_9dc5, step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_the_authors() {
        let hashes = |text: &[u8]| (fnv1a_32(text.iter().copied()), fnv1a(text.iter().copied()));
        assert_eq!(hashes(b""), (0x811c_9dc5, 0xcbf2_9ce4_8422_2325));
        assert_eq!(hashes(b"a"), (0xe40c_292c, 0xaf63_dc4c_8601_ec8c));
        assert_eq!(hashes(b"foobar"), (0xbf9c_f968, 0x8594_4171_f739_67e8));
    }
}
