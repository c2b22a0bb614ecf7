//! The framing of TensorFlow's record files: `length: u64, crc(length): u32, bytes, crc(bytes): u32`, all little-endian. The
//! checksums are CRC-32C, masked.

/// Appends one record.
pub(super) fn write(file: &mut Vec<u8>, record: &[u8]) {
    let length = (record.len() as u64).to_le_bytes();
    file.extend_from_slice(&length);
    file.extend_from_slice(&masked_crc(&length).to_le_bytes());
    file.extend_from_slice(record);
    file.extend_from_slice(&masked_crc(record).to_le_bytes());
}

/// A checksum of data that has checksums in it says little: so it is turned, and a constant is added.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_rfc_3720_masked() {
        // Its example: 32 bytes of zeros.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(masked_crc(&[0; 32]), 0x8a91_36aa_u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }

    #[test]
    fn a_record_has_the_bytes_that_tensorboard_writes() {
        // tensorboard.summary.writer.record_writer.RecordWriter(file).write(b"phalanx")
        let expected = b"\x07\x00\x00\x00\x00\x00\x00\x00\xbb\xd7\x9f\x11phalanx\x01\xaf\xcb\x17";
        let mut file = Vec::new();
        write(&mut file, b"phalanx");
        assert_eq!(file, expected);
    }
}
