//! Bounded codecs for everything that crosses a connection. There is no I/O here; docs/wire.md shows each message.

pub(crate) mod auth;
pub(crate) mod control;
pub(crate) mod frame;
pub(crate) mod greeting;
pub(crate) mod handshake;
pub(crate) mod hello;
pub(crate) mod rpc;
pub(crate) mod store;
pub(crate) mod tls;

/// A cursor over bytes of a fixed length, for decoding little-endian fields in order.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `N` bytes. Zeros after the end, which a check of the magic or length has excluded.
    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, tail)) => {
                self.0 = tail;
                *head
            }
            None => [0; N],
        }
    }

    pub(crate) fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
