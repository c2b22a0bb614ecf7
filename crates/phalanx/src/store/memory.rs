//! temporary
use super::*;
#[derive(Default)]
pub struct MemoryStore(parking_lot::Mutex<std::collections::HashMap<String, Vec<u8>>>, parking_lot::Condvar);
impl MemoryStore {
    pub fn new() -> Self {
        Self::default()
    }
}
#[allow(clippy::unimplemented)]
impl Store for MemoryStore {
    fn set(&self, key: &str, value: &[u8], _: Deadline) -> Result<()> {
        self.0.lock().insert(key.into(), value.into());
        self.1.notify_all();
        Ok(())
    }
    fn get(&self, key: &str, _: Deadline) -> Result<Vec<u8>> {
        let mut m = self.0.lock();
        loop {
            if let Some(v) = m.get(key) {
                return Ok(v.clone());
            }
            self.1.wait(&mut m);
        }
    }
    fn wait(&self, _: &[&str], _: Deadline) -> Result<()> {
        unimplemented!()
    }
    fn check(&self, _: &[&str], _: Deadline) -> Result<bool> {
        unimplemented!()
    }
    fn add(&self, _: &str, _: i64, _: Deadline) -> Result<i64> {
        unimplemented!()
    }
    fn compare_set(&self, _: &str, _: &[u8], _: &[u8], _: Deadline) -> Result<Vec<u8>> {
        unimplemented!()
    }
    fn delete_key(&self, _: &str, _: Deadline) -> Result<bool> {
        unimplemented!()
    }
    fn num_keys(&self, _: Deadline) -> Result<usize> {
        unimplemented!()
    }
    fn append(&self, _: &str, _: &[u8], _: Deadline) -> Result<()> {
        unimplemented!()
    }
    fn multi_get(&self, keys: &[&str], d: Deadline) -> Result<Vec<Vec<u8>>> {
        keys.iter().map(|k| self.get(k, d)).collect()
    }
    fn multi_set(&self, _: &[(&str, &[u8])], _: Deadline) -> Result<()> {
        unimplemented!()
    }
}
