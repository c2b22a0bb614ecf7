//! How an end with TLS and one without find out about each other: by the first bytes, and by an alert that needs no
//! session (RFC 8446, 5.1 and 6).

/// The alert "protocol_version": what an end without TLS answers to one with it, and the other way round.
pub(crate) const REFUSAL: [u8; 7] = [ALERT, 3, 3, 0, 2, 2, 70];

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;

/// Does a client of TLS begin so? No message of ours does, nor of PyTorch's.
pub(crate) fn is_hello(bytes: &[u8]) -> bool {
    bytes.first() == Some(&HANDSHAKE)
}

/// Does an end with TLS answer so to what is not TLS?
pub(crate) fn is_alert(bytes: &[u8]) -> bool {
    bytes.starts_with(&[ALERT, 3])
}
