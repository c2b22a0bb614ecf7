//! A store in an etcd cluster.

mod gateway;
mod lease;

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::slice::from_ref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::gateway::{Gateway, Refused, decode, encode, number};
use self::lease::Lease;
use super::call::Call;
use super::table::Refusal;
use super::{Store, WATCH_INTERVAL};
use crate::deadline::{Backoff, Deadline};
use crate::error::Result;
use crate::interrupt;
use crate::network::Network;

/// The pause between two reads of a key that is waited for grows from the first to the second.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// etcd accepts 128 operations in one transaction.
const MAX_OPERATIONS: usize = 128;

/// A store in an etcd cluster, for launchers of which any may fail.
///
/// All keys are below the job's name, and attached to one lease, which every process that has the store open renews.
/// Some time after the last of them has gone, the keys expire. Values have at most the size that etcd is configured to
/// accept, by default 1.5 MiB.
#[derive(Debug)]
pub struct EtcdStore {
    gateway: Arc<Gateway>,
    /// As errors name it.
    name: String,
    prefix: Vec<u8>,
    lease: Lease,
}

/// The value of a key, and its revision.
struct Found {
    value: Vec<u8>,
    revision: i64,
}

impl EtcdStore {
    /// The store of `job` at `endpoints`, which is a list, `host:port,host:port`.
    ///
    /// # Errors
    /// If an end point is not a host; at `deadline`, if no member of the cluster answers.
    pub fn open(endpoints: &str, job: &str, deadline: Deadline) -> Result<Self> {
        let gateway = Arc::new(Gateway::new(endpoints)?);
        let name = format!("etcd at {}", gateway.names());
        let call = Call::new(&name, "open", from_ref(&job), deadline)?;
        // The job's name may contain slashes; its keys must not be those of another job.
        let scope = format!("phalanx/{}:{job}/", job.len());
        let lease = Lease::open(&gateway, &format!("{scope}lease"), &call)?;
        Ok(Self { gateway, name, prefix: format!("{scope}key/").into_bytes(), lease })
    }

    /// The address of this host in the network that leads to etcd, unless a name has to be looked up and is not found in time.
    pub fn local_address(&self, deadline: Deadline) -> Option<IpAddr> {
        self.gateway.local_address(deadline)
    }

    fn key(&self, key: &str) -> String {
        encode(&[&self.prefix, key.as_bytes()].concat())
    }

    fn put(&self, key: &str, value: &[u8]) -> Value {
        json!({ "key": self.key(key), "value": encode(value), "lease": self.lease.id() })
    }

    fn ask(&self, call: &Call<'_>, path: &str, request: &Value, may_repeat: bool) -> Result<Value> {
        answer(call, self.gateway.ask(path, request, may_repeat, call.deadline))
    }

    /// The value of `key`, if it exists.
    fn look(&self, call: &Call<'_>, key: &str) -> Result<Option<Found>> {
        let answer = self.ask(call, "kv/range", &json!({ "key": self.key(key) }), true)?;
        found(call, &answer)
    }

    /// Writes `value` if the key has not changed since `seen`. If it has, returns the current value.
    fn swap(
        &self,
        call: &Call<'_>,
        key: &str,
        seen: Option<&Found>,
        value: &[u8],
        may_repeat: bool,
    ) -> Result<Option<Option<Found>>> {
        let revision = seen.map_or(0, |found| found.revision).to_string();
        let request = json!({
            "compare": [{ "key": self.key(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision }],
            "success": [{ "request_put": self.put(key, value) }],
            "failure": [{ "request_range": { "key": self.key(key) } }],
        });
        let answer = self.ask(call, "kv/txn", &request, may_repeat)?;
        if answer["succeeded"] == true {
            return Ok(None);
        }
        found(call, &answer["responses"][0]["response_range"]).map(Some)
    }

    /// Changes `key` with `change`, and repeats this until no other change came in between. `may_repeat`: it does no harm twice.
    fn change<T>(
        &self,
        call: &Call<'_>,
        key: &str,
        may_repeat: bool,
        change: impl Fn(&[u8]) -> Result<(T, Vec<u8>), Refusal>,
    ) -> Result<T> {
        let mut seen = self.look(call, key)?;
        loop {
            let old = seen.as_ref().map_or(&b""[..], |found| &found.value);
            let (result, new) = change(old).map_err(|refusal| call.refused(&refusal))?;
            call.value(&new)?;
            match self.swap(call, key, seen.as_ref(), &new, may_repeat)? {
                None => return Ok(result),
                Some(_) if call.deadline.has_passed() => return Err(call.timed_out()),
                Some(now) => seen = now,
            }
        }
    }

    /// Calls `look` until it finds what it waits for.
    fn wait_for<T>(&self, call: &Call<'_>, mut look: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let mut backoff = Backoff::new(PAUSES, call.deadline);
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            interrupt::check()?;
            if !backoff.pause() {
                return Err(call.timed_out());
            }
        }
    }

    /// The value of each of `keys`, if it exists.
    fn look_at_each(&self, call: &Call<'_>, keys: &[&str]) -> Result<Vec<Option<Vec<u8>>>> {
        let mut values = Vec::with_capacity(keys.len());
        for keys in keys.chunks(MAX_OPERATIONS) {
            let ranges: Vec<Value> =
                keys.iter().map(|key| json!({ "request_range": { "key": self.key(key) } })).collect();
            let answer = self.ask(call, "kv/txn", &json!({ "success": ranges }), true)?;
            for index in 0..keys.len() {
                let found = found(call, &answer["responses"][index]["response_range"])?;
                values.push(found.map(|found| found.value));
            }
        }
        Ok(values)
    }

    /// The values of `keys`, if all exist.
    fn look_at_all(&self, call: &Call<'_>, keys: &[&str]) -> Result<Option<Vec<Vec<u8>>>> {
        Ok(self.look_at_each(call, keys)?.into_iter().collect())
    }
}

impl Store for EtcdStore {
    fn set(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "set", from_ref(&key), deadline)?;
        call.value(value)?;
        self.ask(&call, "kv/put", &self.put(key, value), true).map(drop)
    }

    fn get(&self, key: &str, deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "get", from_ref(&key), deadline)?;
        self.wait_for(&call, || Ok(self.look(&call, key)?.map(|found| found.value)))
    }

    fn wait(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "wait", keys, deadline)?;
        self.wait_for(&call, || self.look_at_all(&call, keys)).map(drop)
    }

    fn check(&self, keys: &[&str], deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "check", keys, deadline)?;
        Ok(self.look_at_all(&call, keys)?.is_some())
    }

    /// If etcd's answer is lost, it is unknown whether the amount was added. This is an error, a time-out before its time.
    fn add(&self, key: &str, amount: i64, deadline: Deadline) -> Result<i64> {
        let call = Call::new(&self.name, "add", from_ref(&key), deadline)?;
        self.change(&call, key, amount == 0, |old| {
            let text = String::from_utf8_lossy(old);
            let old: i64 = match &*text {
                "" => 0,
                text => text.parse().map_err(|_| Refusal::NotANumber(text.to_owned()))?,
            };
            let sum = old.checked_add(amount).ok_or(Refusal::Overflow(old, amount))?;
            Ok((sum, sum.to_string().into_bytes()))
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let call = Call::new(&self.name, "compare_set", from_ref(&key), deadline)?;
        call.value(desired)?;
        // If nothing is expected, one request makes the key, or says what is there.
        let mut seen = if expected.is_empty() { None } else { self.look(&call, key)? };
        loop {
            match &seen {
                Some(found) if found.value != expected => return Ok(found.value.clone()),
                None if !expected.is_empty() => return Ok(expected.to_vec()),
                _ => {}
            }
            // If it is sent twice, it finds its own value, which is what the caller wanted.
            match self.swap(&call, key, seen.as_ref(), desired, true)? {
                None => return Ok(desired.to_vec()),
                Some(_) if call.deadline.has_passed() => return Err(call.timed_out()),
                Some(now) => seen = now,
            }
        }
    }

    /// One look at all keys, and then only the changes that change something: those of a log ask mostly for what is there.
    fn multi_compare_set(
        &self,
        changes: &[(&str, &[u8], &[u8])],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<&str> = changes.iter().map(|(key, ..)| *key).collect();
        let call = Call::new(&self.name, "compare_set", &keys, deadline)?;
        let seen = self.look_at_each(&call, &keys)?;
        let mut earlier = HashSet::new();
        let answers = changes.iter().zip(seen).map(|((key, expected, desired), seen)| match seen {
            // An earlier change may be one of the same key.
            _ if !earlier.insert(*key) => self.compare_set(key, expected, desired, deadline),
            Some(value) if value != *expected => Ok(value),
            None if !expected.is_empty() => Ok(expected.to_vec()),
            Some(_) | None => self.compare_set(key, expected, desired, deadline),
        });
        answers.collect()
    }

    fn delete_key(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let call = Call::new(&self.name, "delete_key", from_ref(&key), deadline)?;
        let answer = self.ask(&call, "kv/deleterange", &json!({ "key": self.key(key) }), false)?;
        Ok(number(&answer["deleted"]).is_some_and(|deleted| deleted > 0))
    }

    fn delete_keys(&self, keys: &[&str], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "delete_key", keys, deadline)?;
        keys.chunks(MAX_OPERATIONS).try_for_each(|keys| {
            let ranges: Vec<Value> =
                keys.iter().map(|key| json!({ "request_delete_range": { "key": self.key(key) } })).collect();
            // To remove what is gone already does no harm.
            self.ask(&call, "kv/txn", &json!({ "success": ranges }), true).map(drop)
        })
    }

    fn num_keys(&self, deadline: Deadline) -> Result<usize> {
        let call = Call::new(&self.name, "num_keys", &[], deadline)?;
        let mut end = self.prefix.clone();
        // The prefix ends in a slash. The end of its range has the next byte there.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        let request = json!({ "key": encode(&self.prefix), "range_end": encode(&end), "count_only": true });
        let answer = self.ask(&call, "kv/range", &request, true)?;
        let count = number(&answer["count"]).and_then(|count| usize::try_from(count).ok());
        count.ok_or_else(|| call.broken("it gives no number of keys"))
    }

    /// As for [`add`](Self::add), a lost answer is an error.
    fn append(&self, key: &str, value: &[u8], deadline: Deadline) -> Result<()> {
        let call = Call::new(&self.name, "append", from_ref(&key), deadline)?;
        self.change(&call, key, false, |old| Ok(((), [old, value].concat())))
    }

    fn multi_get(&self, keys: &[&str], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        self.wait_for(&call, || self.look_at_all(&call, keys))
    }

    fn set_and_get(
        &self,
        pairs: &[(&str, &[u8])],
        keys: &[&str],
        deadline: Deadline,
        go_on: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Vec<u8>>> {
        if !pairs.is_empty() {
            self.multi_set(pairs, deadline)?;
        }
        let call = Call::new(&self.name, "multi_get", keys, deadline)?;
        let mut watched = Instant::now();
        self.wait_for(&call, || {
            let found = self.look_at_all(&call, keys)?;
            if found.is_none() && watched.elapsed() >= WATCH_INTERVAL {
                watched = Instant::now();
                go_on()?;
            }
            Ok(found)
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])], deadline: Deadline) -> Result<()> {
        let keys: Vec<&str> = pairs.iter().map(|(key, _)| *key).collect();
        let call = Call::new(&self.name, "multi_set", &keys, deadline)?;
        pairs.iter().try_for_each(|(_, value)| call.value(value))?;
        // One by one: a key may be there twice, which a transaction does not allow.
        for (key, value) in pairs {
            self.ask(&call, "kv/put", &self.put(key, value), true)?;
        }
        Ok(())
    }
}

/// What helps if etcd refuses, as it says, `why`.
fn refusal_remedy(why: &str) -> &'static str {
    let remedies = [
        (
            "space exceeded",
            "compact and defragment etcd, or raise its --quota-backend-bytes; then `etcdctl alarm disarm`. It keeps every earlier heartbeat of \
             the launchers unless it is started with --auto-compaction-retention=1h",
        ),
        ("too large", "raise etcd's --max-request-bytes"),
        ("lease not found", "was this process stopped, or etcd out of reach, for 15 s? Start it again"),
        ("auth", "use an etcd without users and roles, or a proxy that logs in"),
    ];
    let found = remedies.into_iter().find(|(refusal, _)| why.contains(refusal));
    found.map_or("etcd's own log may say more", |(_, remedy)| remedy)
}

/// Converts the error of a request for this store's callers.
fn answer(call: &Call<'_>, answer: Result<Value, Refused>) -> Result<Value> {
    match answer {
        Ok(value) => Ok(value),
        Err(Refused::Silent { cause, .. }) if call.deadline.has_passed() => Err(match cause.kind() {
            io::ErrorKind::TimedOut => call.timed_out(),
            _ => call.timed_out().adding(format!("; the last that was heard of it: {cause}")),
        }),
        Err(Refused::Silent { cause, .. }) => {
            let unknown = format!("; it may have carried this out: {cause}");
            Err(call.unanswered(Network::Unknown).adding(unknown))
        }
        Err(Refused::Error(why)) => {
            let remedy = refusal_remedy(&why);
            Err(call.broken(why).with_remedy(remedy))
        }
        Err(Refused::Ended(error)) => Err(error),
    }
}

/// The first key of a range's answer.
fn found(call: &Call<'_>, answer: &Value) -> Result<Option<Found>> {
    let Some(pair) = answer["kvs"].get(0) else { return Ok(None) };
    match (decode(&pair["value"]), number(&pair["mod_revision"])) {
        (Some(value), Some(revision)) => Ok(Some(Found { value, revision })),
        _ => Err(call.broken("its answer cannot be understood")),
    }
}

/// For `phalanx::fuzzing`: a member's answer to a read of a key.
#[cfg(any(test, fuzzing, feature = "fuzzing"))]
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) -> bool {
    let Ok(said) = serde_json::from_slice::<Value>(bytes) else { return false };
    let Ok(call) = Call::new("members", "get", &["key"], Deadline::now()) else { return false };
    let looked = found(&call, &said).and_then(|_| found(&call, &said["responses"][0]["response_range"]));
    let _ = (number(&said["deleted"]), number(&said["count"]), number(&said["ID"]));
    assert!(looked.as_ref().err().is_none_or(|error| error.to_string().contains("members")));
    looked.is_ok_and(|found| found.is_some()) || found(&call, &said).is_ok_and(|found| found.is_some())
}

#[cfg(test)]
pub(super) mod tests;
