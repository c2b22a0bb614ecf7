//! A store for tests of what becomes of the program's check.

use super::Store;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::interrupt::{self, INTERRUPT_INTERVAL};

/// A store that takes long for each request, makes the check of the program meanwhile, and fails.
pub(crate) struct CheckingStore;

impl CheckingStore {
    fn late<T>(&self) -> Result<T> {
        interrupt::check()?;
        std::thread::sleep(2 * INTERRUPT_INTERVAL);
        interrupt::check()?;
        Err(Error::timeout("it is slow"))
    }
}

impl Store for CheckingStore {
    fn set(&self, _: &str, _: &[u8], _: Deadline) -> Result<()> {
        self.late()
    }

    fn get(&self, _: &str, _: Deadline) -> Result<Vec<u8>> {
        self.late()
    }

    fn wait(&self, _: &[&str], _: Deadline) -> Result<()> {
        self.late()
    }

    fn check(&self, _: &[&str], _: Deadline) -> Result<bool> {
        self.late()
    }

    fn add(&self, _: &str, _: i64, _: Deadline) -> Result<i64> {
        self.late()
    }

    fn compare_set(&self, _: &str, _: &[u8], _: &[u8], _: Deadline) -> Result<Vec<u8>> {
        self.late()
    }

    fn delete_key(&self, _: &str, _: Deadline) -> Result<bool> {
        self.late()
    }

    fn num_keys(&self, _: Deadline) -> Result<usize> {
        self.late()
    }

    fn append(&self, _: &str, _: &[u8], _: Deadline) -> Result<()> {
        self.late()
    }

    fn multi_get(&self, _: &[&str], _: Deadline) -> Result<Vec<Vec<u8>>> {
        self.late()
    }

    fn multi_set(&self, _: &[(&str, &[u8])], _: Deadline) -> Result<()> {
        self.late()
    }
}
