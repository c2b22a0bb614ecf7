//! How the input of a fuzz target is divided.

/// The pieces of `bytes`, each after its length (u16, little-endian); `None` for an incomplete one.
pub fn pieces(mut bytes: &[u8]) -> impl Iterator<Item = Option<&[u8]>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let piece = bytes.split_first_chunk().and_then(|(length, rest)| {
            let (piece, rest) = rest.split_at_checked(u16::from_le_bytes(*length).into())?;
            bytes = rest;
            Some(piece)
        });
        if piece.is_none() {
            bytes = &[];
        }
        Some(piece)
    })
}
