//! Bounded codecs for everything that crosses a connection. There is no I/O here; docs/wire.md shows each message.

pub mod auth;
pub mod control;
pub mod frame;
pub mod greeting;
pub mod handshake;
pub mod hello;
pub mod object;
pub mod rpc;
pub mod store;
pub mod tls;

/// The most bytes that the serialised objects of one call may take, of all ranks together. A peer's length is checked
/// against it before memory is allocated.
pub const MAX_OBJECT_BYTES: usize = 256 << 20;

/// A cursor over bytes of a fixed length, for decoding little-endian fields in order.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// All of `bytes` are ahead.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `N` bytes. Zeros after the end, which a check of the magic or length has excluded.
    pub fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, tail)) => {
                self.0 = tail;
                *head
            }
            None => [0; N],
        }
    }

    /// The next byte.
    pub fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}
