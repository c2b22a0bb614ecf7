//! How a side with TLS and one without recognise each other: by the first bytes, and by an alert that needs no
//! session (RFC 8446, 5.1 and 6).
//!
//! A session of rustls takes 10 KiB of heap as soon as it has read a ClientHello, also of an unknown client. So the
//! first record is read without a session, and sessions are made for a bounded number of handshakes at once. Leaving
//! the first record in the socket, and peeking at it there, would save 2 KiB for each unknown client, but would wake
//! its task again and again while only a part of the record is there.

/// The alert "protocol_version": the answer of a side without TLS to one with it, and vice versa.
pub const REFUSAL: [u8; 7] = [ALERT, 3, 3, 0, 2, 2, 70];

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;

/// The first bytes of a connection, which contain the length of a client's first record.
pub const HELLO_HEAD: usize = 9;
/// The longest first record that is accepted. rustls's has about 210 bytes, and with a key share of ML-KEM 1.5 KB.
pub const LONGEST_HELLO: usize = 1792;

/// Length of the header of a record, and of that of a message.
const RECORD_HEAD: usize = 5;
const MESSAGE_HEAD: usize = 4;

/// Whether these bytes begin a TLS client's handshake. No message of ours does, nor of PyTorch's.
pub fn is_hello(bytes: &[u8]) -> bool {
    bytes.first() == Some(&HANDSHAKE)
}

/// Whether this is the alert that a side with TLS sends to a client without.
pub fn is_alert(bytes: &[u8]) -> bool {
    bytes.starts_with(&[ALERT, 3])
}

/// The length of a client's first record with this beginning. None if it is not exactly one complete ClientHello, or
/// too long.
pub fn hello_length(head: &[u8; HELLO_HEAD]) -> Option<usize> {
    let [HANDSHAKE, 3, _, record @ .., CLIENT_HELLO, a, b, c] = *head else { return None };
    let record = usize::from(u16::from_be_bytes(record));
    let message = u32::from_be_bytes([0, a, b, c]) as usize;
    let length = record + RECORD_HEAD;
    (message + MESSAGE_HEAD == record && length <= LONGEST_HELLO).then_some(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(record: u16, message: u32) -> [u8; HELLO_HEAD] {
        let ([high, low], [_, a, b, c]) = (record.to_be_bytes(), message.to_be_bytes());
        [HANDSHAKE, 3, 1, high, low, CLIENT_HELLO, a, b, c]
    }

    #[test]
    fn a_first_record_is_one_message_and_no_longer_than_allowed() {
        assert_eq!(hello_length(&head(206, 202)), Some(211));
        assert_eq!(hello_length(&head(1787, 1783)), Some(LONGEST_HELLO));
        // Too long; in pieces; with something after it.
        for (record, message) in [(1788, 1784), (206, 203), (206, 201), (0, 0), (3, 0xff_ffff)] {
            assert_eq!(hello_length(&head(record, message)), None, "{record} {message}");
        }
        // Not a handshake, another protocol, another message.
        for (place, byte) in [(0, 23), (1, 2), (5, 2)] {
            let mut head = head(206, 202);
            head[place] = byte;
            assert_eq!(hello_length(&head), None, "{place}");
        }
    }

    proptest! {
        #[test]
        fn no_head_announces_much(head in any::<[u8; HELLO_HEAD]>(), begins_well in any::<bool>()) {
            let mut head = head;
            if begins_well {
                (head[0], head[1], head[5]) = (HANDSHAKE, 3, CLIENT_HELLO);
            }
            let length = hello_length(&head).unwrap_or(HELLO_HEAD);
            prop_assert!((HELLO_HEAD..=LONGEST_HELLO).contains(&length));
        }
    }
}
