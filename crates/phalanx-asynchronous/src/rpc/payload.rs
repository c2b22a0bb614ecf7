//! What travels with a frame: arguments and results, as postcard writes them.
//!
//! serde lends bytes to a serialiser, and to a deserialiser, only for the time of a call, so both have to copy them. [`Bytes`] are not
//! copied: a thread-local holds the memory in which they are, and these two hold that memory in place of a copy. They find it by the
//! address of the bytes, so `Bytes` that another format writes or reads at the same time are not taken for these.

use std::cell::RefCell;
use std::fmt;
use std::ops::{Deref, Range};
use std::sync::{Arc, Weak};
use std::thread::LocalKey;

use postcard::ser_flavors::Flavor;
use serde::de::{DeserializeOwned, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::spare::{LEAST, Spare};
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::error::Result;
use crate::wire::object;

thread_local! {
    /// The bytes that this thread is writing.
    static LENT: RefCell<Option<Bytes>> = const { RefCell::new(None) };
    /// The payload that this thread is reading.
    static READ: RefCell<Option<Arc<Received>>> = const { RefCell::new(None) };
}

/// Bytes that remote calls send without a copy: an argument, a result, or a part of one. A `Vec<u8>` is written number by number, which takes longer.
///
/// Three kinds of bytes are copied once: less than 32 KiB, less than half of the bytes of the call with which they come, and what a rank
/// sends to itself. Clones share the bytes. Bytes from another rank keep the memory of the whole call until the last clone is dropped.
///
/// ```
/// use phalanx::ProcessGroup;
/// use phalanx::asynchronous::{Bytes, Rpc};
/// let rpc = Rpc::builder()
///     .handler("echo", |_, (number, bytes): (u32, Bytes)| Ok((bytes, number + 1)))
///     .start(&ProcessGroup::alone()?)?;
/// let sent = Bytes::from(vec![7; 1 << 20]);
/// let (back, number): (Bytes, u32) = rpc.call(rpc.rank(), "echo", &(1u32, &sent))?;
/// assert!(back == sent && back[5] == 7 && number == 2);
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone)]
pub struct Bytes {
    memory: Memory,
    place: Range<usize>,
}

#[derive(Clone)]
enum Memory {
    Own(Arc<Vec<u8>>),
    Received(Arc<Received>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let whole = match &self.memory {
            Memory::Own(bytes) => bytes.as_slice(),
            Memory::Received(payload) => payload.as_bytes(),
        };
        &whole[self.place.clone()]
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        let place = 0..bytes.len();
        Self { memory: Memory::Own(Arc::new(bytes)), place }
    }
}

impl PartialEq for Bytes {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Bytes {}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let _writing = While::new(&LENT, self.clone());
        serializer.serialize_bytes(self)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOnePiece;
        impl<'de> Visitor<'de> for InOnePiece {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("bytes")
            }

            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Bytes, E> {
                Ok(received(bytes).unwrap_or_else(|| bytes.to_vec().into()))
            }

            /// From formats that have no bytes, such as JSON.
            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Bytes, A::Error> {
                let mut bytes: Vec<u8> = Vec::new();
                while let Some(byte) = numbers.next_element()? {
                    bytes.push(byte);
                }
                Ok(bytes.into())
            }
        }
        deserializer.deserialize_bytes(InOnePiece)
    }
}

/// `bytes` without a copy, if they are the ones that this thread is writing.
fn lent(bytes: &[u8]) -> Option<Bytes> {
    LENT.with_borrow(|lent| lent.clone().filter(|lent| std::ptr::eq::<[u8]>(&**lent, bytes)))
}

/// `bytes` without a copy, if they are in the payload that this thread is reading, and at least half of it: they keep the memory of all of it.
fn received(bytes: &[u8]) -> Option<Bytes> {
    READ.with_borrow(|payload| {
        let payload = payload.as_ref()?;
        let whole = payload.as_bytes();
        let begin = bytes.as_ptr().addr().checked_sub(whole.as_ptr().addr())?;
        let end = begin.checked_add(bytes.len())?;
        let is_in = end <= whole.len() && bytes.len() >= LEAST && bytes.len() >= whole.len() / 2;
        is_in.then(|| Bytes { memory: Memory::Received(payload.clone()), place: begin..end })
    })
}

/// Puts a value into a thread-local until this is dropped.
struct While<T: 'static> {
    place: &'static LocalKey<RefCell<Option<T>>>,
    before: Option<T>,
}

impl<T: 'static> While<T> {
    fn new(place: &'static LocalKey<RefCell<Option<T>>>, value: T) -> Self {
        Self { place, before: place.replace(Some(value)) }
    }
}

impl<T: 'static> Drop for While<T> {
    fn drop(&mut self) {
        self.place.set(self.before.take());
    }
}

/// What is to be sent.
#[derive(Debug, Default)]
pub(super) struct Written {
    own: Vec<u8>,
    /// The bytes without a copy, and how much of the rest comes before each.
    lent: Vec<(usize, Bytes)>,
}

impl Written {
    /// `value` behind these bytes.
    ///
    /// # Errors
    /// If `value`, which is `what`, cannot be written, or there is no memory for it.
    pub(super) fn behind<T: Serialize + ?Sized>(own: Vec<u8>, value: &T, what: &str) -> Result<Self> {
        let written = postcard::serialize_with_flavor(value, Self { own, lent: Vec::new() });
        written.map_err(|error| object::unwritten(what, error))
    }

    fn make_room(&mut self, more: usize) -> postcard::Result<()> {
        self.own.try_reserve(more).map_err(|_| postcard::Error::SerializeBufferFull)
    }

    pub(super) fn len(&self) -> usize {
        self.own.len() + self.lent.iter().map(|(_, bytes)| bytes.len()).sum::<usize>()
    }

    /// All of it, in its order.
    pub(super) fn parts(&self) -> Vec<&[u8]> {
        let (mut parts, mut begin) = (Vec::with_capacity(2 * self.lent.len() + 1), 0);
        for (place, bytes) in &self.lent {
            parts.extend([&self.own[begin..*place], &**bytes]);
            begin = *place;
        }
        parts.push(&self.own[begin..]);
        parts.retain(|part| !part.is_empty());
        parts
    }
}

impl From<Vec<u8>> for Written {
    fn from(own: Vec<u8>) -> Self {
        Self { own, lent: Vec::new() }
    }
}

impl Flavor for Written {
    type Output = Self;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.make_room(1)?;
        self.own.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        // Most are short, and are not looked for.
        match (bytes.len() >= LEAST).then(|| lent(bytes)).flatten() {
            Some(bytes) => self.lent.push((self.own.len(), bytes)),
            None => {
                self.make_room(bytes.len())?;
                self.own.extend_from_slice(bytes);
            }
        }
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Self> {
        Ok(self)
    }
}

/// A payload that was received. When its last reader is dropped, its memory goes to `Spare`.
pub(super) struct Received {
    buffer: Buffer,
    /// It may outlive the calls.
    spare: Weak<Spare>,
}

impl Received {
    pub(super) fn new(buffer: Buffer, spare: &Arc<Spare>) -> Arc<Self> {
        Arc::new(Self { buffer, spare: Arc::downgrade(spare) })
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.buffer.as_bytes()
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if let Some(spare) = self.spare.upgrade() {
            spare.give(std::mem::replace(&mut self.buffer, Buffer::zeroed(DType::U8, 0)));
        }
    }
}

/// The value that the bytes of `payload` from `begin` on encode, to the last byte; or why it cannot be read.
pub(super) fn read<T: DeserializeOwned>(payload: &Arc<Received>, begin: usize) -> Result<T, String> {
    let _reading = While::new(&READ, payload.clone());
    match postcard::take_from_bytes(&payload.as_bytes()[begin..]) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes are left over", rest.len())),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(written: &Written, spare: &Arc<Spare>) -> Arc<Received> {
        Received::new(spare.copy(&written.parts()).unwrap(), spare)
    }

    fn long(byte: u8) -> Bytes {
        vec![byte; LEAST].into()
    }

    #[test]
    fn long_bytes_are_neither_copied_when_they_are_written_nor_when_they_are_read() {
        let (spare, sent) = (Arc::new(Spare::default()), Bytes::from(vec![3; 1 << 20]));
        let written = Written::behind(b"name".to_vec(), &(1u8, &sent, "text"), "a value").unwrap();
        let parts = written.parts();
        assert_eq!(parts[0], [&b"name"[..], &[1, 0x80, 0x80, 0x40]].concat());
        assert!(std::ptr::eq::<[u8]>(parts[1], &*sent));
        assert_eq!((parts[2], parts.len(), written.len()), (&b"\x04text"[..], 3, 8 + (1 << 20) + 5));
        let payload = payload(&written, &spare);
        let (number, read, text): (u8, Bytes, String) = read(&payload, 4).unwrap();
        assert_eq!((number, &*text), (1, "text"));
        assert!(read == sent && std::ptr::eq(read.as_ptr(), &raw const payload.as_bytes()[8]));
        drop(payload);
        assert_eq!(spare.count(), 0, "it is still read");
        let again = read.clone();
        drop(read);
        assert!(again == sent);
        drop(again);
        assert_eq!(spare.count(), 1);
    }

    #[test]
    fn bytes_among_others_come_back_whatever_their_lengths() {
        let spare = Arc::new(Spare::default());
        let short = Bytes::from(vec![5; 10]);
        let sent = vec![short.clone(), long(1), Bytes::from(Vec::new()), long(2), long(1), short];
        let written = Written::behind(Vec::new(), &sent, "a value").unwrap();
        assert_eq!(written.lent.len(), 3);
        let all = payload(&written, &spare);
        assert_eq!(read::<Vec<Bytes>>(&all, 0).unwrap(), sent);
        assert_eq!(Arc::strong_count(&all), 1, "none is half of the payload");
        // As any other bytes of serde.
        assert_eq!(postcard::from_bytes::<Vec<Bytes>>(all.as_bytes()).unwrap(), sent);
        assert_eq!(postcard::to_stdvec(&sent).unwrap(), all.as_bytes());
        assert!(read::<Vec<Bytes>>(&all, 1).is_err());
    }

    #[test]
    fn other_formats_inside_a_call_hold_the_bytes_themselves() {
        /// Writes its bytes as a text.
        struct Text(Bytes);
        impl Serialize for Text {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let text = serde_json::to_string(&self.0).map_err(<S::Error as serde::ser::Error>::custom)?;
                serializer.serialize_str(&text)
            }
        }
        let (spare, sent) = (Arc::new(Spare::default()), long(7));
        let written = Written::behind(Vec::new(), &Text(sent.clone()), "a value").unwrap();
        assert!(written.lent.is_empty());
        let text: String = read(&payload(&written, &spare), 0).unwrap();
        assert_eq!(serde_json::from_str::<Bytes>(&text).unwrap(), sent);
        assert!(LENT.with_borrow(Option::is_none) && READ.with_borrow(Option::is_none));
    }
}
