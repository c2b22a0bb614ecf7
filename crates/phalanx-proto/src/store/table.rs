//! The operations of every store on its keys and values, with the caps of all stores.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use crate::wire::store::MAX_VALUE;

/// The most keys of a store.
pub const MAX_KEYS: usize = 1 << 20;
/// The most bytes of keys and values of a store.
pub const MAX_BYTES: usize = 1 << 30;

/// Keys and values.
#[derive(Debug)]
pub struct Table {
    values: BTreeMap<Vec<u8>, Value>,
    bytes: usize,
    max_keys: usize,
    max_bytes: usize,
}

/// A value, and what was appended to it since it was set. To copy the whole each time would take the square of the time: all workers of an
/// elastic job append to one list.
#[derive(Debug)]
struct Value {
    set: Arc<[u8]>,
    appended: Vec<u8>,
    /// Both, once somebody has read them: however many read one value, and however often, it is copied once.
    whole: OnceLock<Arc<[u8]>>,
}

impl Value {
    fn new(set: Arc<[u8]>) -> Self {
        Self { set, appended: Vec::new(), whole: OnceLock::new() }
    }

    fn len(&self) -> usize {
        self.set.len() + self.appended.len()
    }

    fn whole(&self) -> Arc<[u8]> {
        match self.appended.is_empty() {
            true => Arc::clone(&self.set),
            false => {
                Arc::clone(self.whole.get_or_init(|| [&self.set[..], &self.appended[..]].concat().into()))
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) {
        if let Some(whole) = self.whole.take() {
            (self.set, self.appended) = (whole, Vec::new());
        }
        self.appended.extend_from_slice(bytes);
    }

    fn is(&self, bytes: &[u8]) -> bool {
        bytes.strip_prefix(&*self.set).is_some_and(|rest| rest == self.appended)
    }
}

/// Why a store refuses a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A counter's value is no number.
    #[error("the value {0:?} is not a decimal number, so nothing can be added to it")]
    NotANumber(String),
    /// A counter would leave its range.
    #[error("the sum of {0} and {1} does not fit 64 bits")]
    Overflow(i64, i64),
    /// A value is longer than all may be.
    #[error("a value of {0} bytes is longer than the {MAX_VALUE} bytes a store takes")]
    LongValue(usize),
    /// There is no room for another key.
    #[error("the store is full: it holds {0} keys")]
    ManyKeys(usize),
    /// There is no room for more bytes.
    #[error("the store is full: it holds {0} bytes")]
    ManyBytes(usize),
}

impl Default for Table {
    fn default() -> Self {
        Self::with_caps(MAX_KEYS, MAX_BYTES)
    }
}

impl Table {
    /// An empty one, with these caps.
    pub fn with_caps(max_keys: usize, max_bytes: usize) -> Self {
        Self { values: BTreeMap::new(), bytes: 0, max_keys, max_bytes }
    }

    /// The value of `key`.
    pub fn get(&self, key: &[u8]) -> Option<Arc<[u8]>> {
        self.values.get(key).map(Value::whole)
    }

    /// Whether `key` has a value.
    pub fn contains(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
    }

    /// Whether there is no key.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// The bytes of all keys and values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    /// Gives `key` this value.
    ///
    /// # Errors
    /// If a cap would be exceeded; then nothing has changed, as in all that follows.
    pub fn set(&mut self, key: &[u8], value: impl Into<Arc<[u8]>>) -> Result<(), Refusal> {
        let value = value.into();
        if value.len() > MAX_VALUE {
            return Err(Refusal::LongValue(value.len()));
        }
        if let Some(old) = self.values.get_mut(key) {
            let bytes = self.bytes - old.len() + value.len();
            if bytes > self.max_bytes {
                return Err(Refusal::ManyBytes(self.bytes));
            }
            self.bytes = bytes;
            *old = Value::new(value);
            return Ok(());
        }
        let bytes = self.bytes + key.len() + value.len();
        if self.values.len() >= self.max_keys {
            return Err(Refusal::ManyKeys(self.values.len()));
        }
        if bytes > self.max_bytes {
            return Err(Refusal::ManyBytes(self.bytes));
        }
        self.bytes = bytes;
        self.values.insert(key.to_vec(), Value::new(value));
        Ok(())
    }

    /// Adds to a counter, which begins at 0; returns the sum.
    ///
    /// # Errors
    /// If the value is no number, or the sum does not fit.
    pub fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, Refusal> {
        let old = self.values.get(key).map_or(Ok(0), |value| decimal(&value.whole()))?;
        let sum = old.checked_add(amount).ok_or(Refusal::Overflow(old, amount))?;
        self.set(key, sum.to_string().into_bytes())?;
        Ok(sum)
    }

    /// Sets `key` if its value is `expected`, or if it has none and `expected` is empty. Returns the value after the call, and whether it was just
    /// written.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    pub fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
    ) -> Result<(Arc<[u8]>, bool), Refusal> {
        let matches = match self.values.get(key) {
            Some(value) => value.is(expected),
            None => expected.is_empty(),
        };
        if matches {
            self.set(key, desired)?;
        }
        Ok((self.get(key).unwrap_or_else(|| expected.into()), matches))
    }

    /// Adds bytes to the end of a value.
    ///
    /// # Errors
    /// As [`set`](Self::set).
    pub fn append(&mut self, key: &[u8], value: &[u8]) -> Result<(), Refusal> {
        let Some(old) = self.values.get_mut(key) else { return self.set(key, value) };
        let length = old.len() + value.len();
        if length > MAX_VALUE {
            return Err(Refusal::LongValue(length));
        }
        let bytes = self.bytes + value.len();
        if bytes > self.max_bytes {
            return Err(Refusal::ManyBytes(self.bytes));
        }
        self.bytes = bytes;
        old.append(value);
        Ok(())
    }

    /// Removes `key`; returns whether it was there.
    pub fn delete(&mut self, key: &[u8]) -> bool {
        let old = self.values.remove(key);
        self.bytes -= old.as_ref().map_or(0, |value| key.len() + value.len());
        old.is_some()
    }
}

/// A counter's value, as PyTorch writes it.
///
/// # Errors
/// If it is no number.
pub fn decimal(value: &[u8]) -> Result<i64, Refusal> {
    let text = String::from_utf8_lossy(value);
    text.trim().parse().map_err(|_| Refusal::NotANumber(text.chars().take(64).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caps_hold_and_freed_room_is_used_again() {
        let mut table = Table::with_caps(2, 20);
        table.set(b"a", *b"1").unwrap();
        table.set(b"b", *b"1").unwrap();
        assert_eq!(table.set(b"c", *b"1"), Err(Refusal::ManyKeys(2)));
        assert_eq!(table.append(b"a", &[0; 17]), Err(Refusal::ManyBytes(4)));
        table.append(b"a", &[0; 16]).unwrap();
        assert!(table.delete(b"a") && !table.delete(b"a"));
        table.set(b"c", vec![0; 17]).unwrap();
        assert_eq!(table.set(b"c", vec![0; MAX_VALUE + 1]), Err(Refusal::LongValue(MAX_VALUE + 1)));
        assert_eq!((table.keys().count(), table.bytes()), (2, 20));
    }

    /// If each copied what is there, this would take minutes.
    #[test]
    fn many_append_to_one_value() {
        const TIMES: usize = 200_000;
        let mut table = Table::default();
        table.set(b"a", *b"start ").unwrap();
        (0..TIMES).for_each(|_| table.append(b"a", b"and so on ").unwrap());
        let whole = table.get(b"a").unwrap();
        assert!(whole.len() == 6 + 10 * TIMES && whole.starts_with(b"start and so on and"));
        assert_eq!(table.bytes(), 1 + whole.len());
        for wrong in [&whole[..6], &whole[..whole.len() - 1], b""] {
            assert!(!table.compare_set(b"a", wrong, b"x").unwrap().1);
        }
        assert!(table.compare_set(b"a", &whole, b"7").unwrap().1);
        table.append(b"a", b"0").unwrap();
        assert_eq!((table.add(b"a", 1), table.bytes()), (Ok(71), 3));
        assert!(table.delete(b"a") && table.bytes() == 0);
    }

    #[test]
    fn all_who_read_what_was_appended_share_one_copy() {
        let mut table = Table::default();
        table.set(b"a", *b"one").unwrap();
        table.append(b"a", b" two").unwrap();
        let [first, second] = [(); 2].map(|()| table.get(b"a").unwrap());
        assert!(Arc::ptr_eq(&first, &second) && *first == *b"one two");
        table.append(b"a", b" three").unwrap();
        assert_eq!((&*first, &*table.get(b"a").unwrap()), (&b"one two"[..], &b"one two three"[..]));
        assert_eq!(table.bytes(), 1 + 13);
    }

    #[test]
    fn only_numbers_are_added_to() {
        let mut table = Table::default();
        table.set(b"a", *b"x").unwrap();
        assert_eq!(table.add(b"a", 1), Err(Refusal::NotANumber("x".into())));
        assert_eq!(table.add(b"n", i64::MAX), Ok(i64::MAX));
        assert_eq!(table.add(b"n", 1), Err(Refusal::Overflow(i64::MAX, 1)));
        assert_eq!(table.get(b"n").as_deref(), Some(i64::MAX.to_string().as_bytes()));
    }
}
