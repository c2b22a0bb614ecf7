//! The objects that this rank keeps for others, and which ranks hold references to them.

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::rank::Rank;
use crate::wire::rpc::ObjectId;

pub(super) type Value = Arc<dyn Any + Send + Sync>;

/// Each object lives until no rank holds it.
#[derive(Default)]
pub(super) struct Objects(Mutex<HashMap<ObjectId, Kept>>);

struct Kept {
    /// None while it is being made.
    value: Option<Value>,
    /// How often each rank holds it.
    holders: BTreeMap<Rank, u64>,
}

impl Objects {
    /// `by` has asked for an object, which it holds from now on.
    pub(super) fn begin(&self, object: ObjectId, by: Rank) -> Result<()> {
        if object.creator != by {
            return Err(Error::protocol(format!(
                "rank {by} has numbered an object of rank {}",
                object.creator
            )));
        }
        let kept = Kept { value: None, holders: BTreeMap::from([(by, 1)]) };
        match self.0.lock().insert(object, kept) {
            None => Ok(()),
            Some(_) => Err(Error::protocol(format!("rank {by} has made its object {} twice", object.number))),
        }
    }

    /// The object has been made. If no rank holds it any more, it is returned.
    pub(super) fn keep(&self, object: ObjectId, value: Value) -> Option<Value> {
        match self.0.lock().get_mut(&object) {
            Some(kept) => kept.value.replace(value),
            None => Some(value),
        }
    }

    pub(super) fn get(&self, object: ObjectId, by: Rank) -> Result<Value> {
        held(&mut self.0.lock(), object, by).map(|(value, _)| value)
    }

    /// `to` holds the object too.
    pub(super) fn lend(&self, object: ObjectId, by: Rank, to: Rank) -> Result<()> {
        // Under one lock: between two `by` may let go, and the object would be nobody's.
        let mut objects = self.0.lock();
        let (_, holders) = held(&mut objects, object, by)?;
        *holders.entry(to).or_default() += 1;
        Ok(())
    }

    /// `by` holds it once less. Returns the object if no rank holds it any more: it must not be dropped here, since its `drop` is
    /// the program's code.
    pub(super) fn release(&self, object: ObjectId, by: Rank) -> Option<Value> {
        let mut objects = self.0.lock();
        let kept = objects.get_mut(&object)?;
        if let Some(count) = kept.holders.get_mut(&by) {
            *count -= 1;
            if *count == 0 {
                kept.holders.remove(&by);
            }
        }
        match kept.holders.is_empty() {
            true => objects.remove(&object).and_then(|kept| kept.value),
            false => None,
        }
    }

    /// `by` holds nothing any more. Returns the objects that no rank holds now.
    pub(super) fn release_all(&self, by: Rank) -> Vec<Value> {
        let mut dropped = Vec::new();
        self.0.lock().retain(|_, kept| {
            kept.holders.remove(&by);
            if kept.holders.is_empty() {
                dropped.extend(kept.value.take());
            }
            !kept.holders.is_empty()
        });
        dropped
    }

    pub(super) fn count(&self) -> usize {
        self.0.lock().len()
    }
}

/// An object that `by` holds, and all its holders.
fn held(
    objects: &mut HashMap<ObjectId, Kept>,
    object: ObjectId,
    by: Rank,
) -> Result<(Value, &mut BTreeMap<Rank, u64>)> {
    let kept = objects.get_mut(&object).filter(|kept| kept.holders.contains_key(&by));
    kept.and_then(|kept| Some((kept.value.clone()?, &mut kept.holders))).ok_or_else(|| {
        Error::invalid_argument(format!(
            "rank {by} holds no object {} of rank {}",
            object.number, object.creator
        ))
        .with_remedy("accept each ticket once, and call a method only while a reference is kept")
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    fn object(number: u64) -> ObjectId {
        ObjectId { creator: Rank::new(1), number }
    }

    #[test]
    fn a_value_lives_until_its_last_holder_lets_go() {
        let (one, two) = (Rank::new(1), Rank::new(2));
        let objects = Objects::default();
        let value = Arc::new(5i32);
        objects.begin(object(1), one).unwrap();
        assert!(objects.get(object(1), one).is_err(), "it is still being made");
        objects.keep(object(1), value.clone());
        let error = objects.get(object(1), two).unwrap_err();
        assert!(error.remedy().is_some(), "rank 2 does not hold it: {error}");
        objects.lend(object(1), one, two).unwrap();
        objects.release(object(1), one);
        assert!(objects.get(object(1), one).is_err() && objects.get(object(1), two).is_ok());
        objects.release(object(1), one);
        assert_eq!((Arc::strong_count(&value), objects.count()), (2, 1));
        objects.release_all(two);
        assert_eq!((Arc::strong_count(&value), objects.count()), (1, 0));
    }

    #[test]
    fn what_was_lent_is_held_whatever_the_lender_does_meanwhile() {
        let (one, two) = (Rank::new(1), Rank::new(2));
        let objects = Objects::default();
        for number in 0..2_000 {
            objects.begin(object(number), one).unwrap();
            objects.keep(object(number), Arc::new(5i32));
            let begin = Barrier::new(2);
            let lent = std::thread::scope(|scope| {
                let lends = scope.spawn(|| {
                    begin.wait();
                    objects.lend(object(number), one, two).is_ok()
                });
                begin.wait();
                objects.release(object(number), one);
                lends.join().unwrap()
            });
            assert_eq!(objects.get(object(number), two).is_ok(), lent, "round {number}");
        }
    }

    #[test]
    fn a_value_that_was_let_go_while_it_was_made_is_not_kept() {
        let objects = Objects::default();
        objects.begin(object(1), Rank::new(1)).unwrap();
        objects.release(object(1), Rank::new(1));
        let value = Arc::new(());
        objects.keep(object(1), value.clone());
        assert_eq!((Arc::strong_count(&value), objects.count()), (1, 0));
        assert!(objects.begin(object(2), Rank::MAIN).is_err(), "another rank's number");
        objects.begin(object(3), Rank::new(1)).unwrap();
        assert!(objects.begin(object(3), Rank::new(1)).is_err());
    }
}
