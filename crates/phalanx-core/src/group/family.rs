//! The groups of a rank that were made from the same first group, so that one failure can end them all.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::{Inner, ProcessGroup};
use crate::error::{Error, Kind};
use crate::health::{Health, Surroundings};
use crate::notice::warn;
use crate::rank::Rank;

/// A rank's groups that its program has made: the first one, and those made from it.
#[derive(Default)]
pub(crate) struct Family {
    groups: Mutex<Vec<Weak<Inner>>>,
    /// Apart from the groups: a thread that a group waits for when it is dropped must not be the last that holds it.
    healths: Mutex<Vec<Weak<Health>>>,
    /// The cause of each one's failure, if it has failed, and the global ranks of its ranks. Those of groups that are gone stay.
    failures: Mutex<Vec<Failure>>,
    /// The sections that take long, as the ranks know, in which this rank is.
    sections: AtomicUsize,
    /// Whether a warning has said that all groups are gone, and that something needed one.
    has_warned: AtomicBool,
}

type Failure = (Arc<OnceLock<Error>>, Option<Arc<[Rank]>>);

/// The most causes that are kept of groups that are gone.
const MAX_FAILURES: usize = 256;

/// A section that takes long, as all ranks know.
pub struct Section(Arc<Family>);

impl Drop for Section {
    fn drop(&mut self) {
        self.0.sections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Family {
    pub(super) fn enter(self: &Arc<Self>, group: &Arc<Inner>) {
        let mut members = self.groups.lock();
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(group));
        drop(members);
        let own = Arc::downgrade(&group.health);
        let mut healths = self.healths.lock();
        healths.retain(|health| health.strong_count() > 0);
        healths.push(own.clone());
        drop(healths);
        let mut failures = self.failures.lock();
        let is_gone = |(first, _): &Failure| Arc::strong_count(first) == 1;
        failures.retain(|failure| !is_gone(failure) || failure.0.get().is_some());
        // Of the groups that are still there, each has its threads and connections, too.
        if failures.iter().filter(|failure| is_gone(failure)).count() > MAX_FAILURES {
            failures.iter().position(is_gone).map(|oldest| failures.remove(oldest));
        }
        failures.push((group.health.first(), group.config.members.clone()));
        drop(failures);
        let family = Arc::downgrade(self);
        group.health.look_around_with(Box::new(move || {
            family.upgrade().map(|family| family.surroundings(&own)).unwrap_or_default()
        }));
    }

    /// What this rank does outside the group whose health is `own`.
    fn surroundings(&self, own: &Weak<Health>) -> Surroundings {
        let healths: Vec<Arc<Health>> =
            self.healths.lock().iter().filter(|other| !other.ptr_eq(own)).filter_map(Weak::upgrade).collect();
        Surroundings {
            is_announced: self.sections.load(Ordering::Relaxed) > 0,
            elsewhere: healths.iter().find_map(|health| health.describe_wait()),
        }
    }

    /// Whether a group has failed with such a cause.
    fn has_failed(&self, is_cause: impl Fn(&Error) -> bool) -> bool {
        let healths: Vec<Arc<Health>> = self.healths.lock().iter().filter_map(Weak::upgrade).collect();
        healths.iter().any(|health| health.first().get().is_some_and(&is_cause))
    }

    pub(super) fn members(&self) -> Vec<Arc<Inner>> {
        // Not under the lock: if one of them is dropped here, its threads are waited for.
        self.groups.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Warns of `cause`, which none of the groups can give to the program any more. Each operation of a graph may come here: it is said once.
    pub(super) fn warn_once(&self, cause: &Error) {
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            warn(format_args!("a result is not a number: {cause}"));
        }
    }
}

impl ProcessGroup {
    /// Whether both were made from the same first group: its ranks are the global ranks of both.
    #[doc(hidden)]
    pub fn is_related(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner.config.family, &other.inner.config.family)
    }

    /// Until the value is dropped, this rank is in a section that takes long, as all ranks know: calls that wait for it are not
    /// reported.
    #[doc(hidden)]
    pub fn announce_section(&self) -> Section {
        let family = self.inner.config.family.clone();
        family.sections.fetch_add(1, Ordering::Relaxed);
        Section(family)
    }

    /// Ends this group, as [`abort`](Self::abort) does, and with it every group that this rank's program has made from the same
    /// first group, the first one too.
    ///
    /// For a failure after which this rank has nothing to give to any group. If a tensor-parallel layer does not get its sum, its
    /// gradients mean nothing, and replicas in another group must not average them: they get the cause instead.
    ///
    /// ```
    /// use phalanx::{Error, ProcessGroup, Rank, WorldSize};
    /// let groups = ProcessGroup::in_process(WorldSize::new(2)?)?;
    /// std::thread::scope(|scope| {
    ///     for group in groups {
    ///         scope.spawn(move || {
    ///             let tensor = group.new_group(&[group.rank(), Rank::new(1 - group.rank().get())])?.expect("a member");
    ///             tensor.abort_all(Error::other("the layer has no result"));
    ///             assert!(group.barrier().unwrap_err().to_string().contains("the layer has no result"));
    ///             Ok::<(), Error>(())
    ///         });
    ///     }
    /// });
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "_abort_process_group")]
    pub fn abort_all(&self, cause: Error) {
        self.abort(cause.clone());
        let cause = self.failure().unwrap_or(cause);
        for member in self.inner.config.family.members() {
            if !Arc::ptr_eq(&member, &self.inner) {
                member.aborted.store(true, Ordering::Relaxed);
                member.health.fail(self.inner.failure_for(&member, &cause));
            }
        }
    }

    /// Why another group has failed that this rank's program has made from the same first group, if it is such a cause; with the numbers that
    /// ranks have in this group. Also if the program has dropped it since.
    pub(crate) fn failure_in_family(&self, is_such: impl Fn(&Error) -> bool) -> Option<Error> {
        let own = self.inner.health.first();
        let failures = self.inner.config.family.failures.lock().clone();
        let others = failures.iter().filter(|(first, _)| !Arc::ptr_eq(first, &own));
        let mut causes = others.filter_map(|(first, members)| {
            let global = |rank: Rank| rank.global(members.as_deref());
            first.get().map(|cause| restated(cause, global, &self.inner))
        });
        causes.find(is_such)
    }

    /// `cause` with the numbers that ranks have in this group, if it is the failure of another group of this rank, as of a smaller one whose ranks have other
    /// numbers: else a rank that has nothing to do with it would be blamed.
    pub(super) fn in_own_numbers(&self, cause: Error) -> Error {
        let Some(rank) = cause.rank() else { return cause };
        let is_cause = |own: &Error| {
            (own.rank(), own.host()) == (cause.rank(), cause.host()) && cause.cause().contains(own.cause())
        };
        let family = &self.inner.config.family;
        // Mostly none has, and no group is held here.
        if !family.has_failed(is_cause) {
            return cause;
        }
        let members = family.members();
        let mut others = members.iter().filter(|member| !Arc::ptr_eq(member, &self.inner));
        let Some(failed) = others.find(|member| member.health.first().get().is_some_and(is_cause)) else {
            return cause;
        };
        let here = |rank| self.group_rank(failed.config.global(rank));
        if [Some(rank), cause.peer()].into_iter().flatten().all(|rank| here(rank) == Some(rank)) {
            return cause;
        }
        failed.failure_for(&self.inner, &cause)
    }
}

impl Inner {
    /// This group's failure as that of `other`, in which ranks have other numbers.
    fn failure_for(&self, other: &Self, cause: &Error) -> Error {
        restated(cause, |rank| self.config.global(rank), other)
    }
}

/// The failure of a group whose ranks have these `global` numbers, as that of `other`, in which ranks have other numbers.
fn restated(cause: &Error, global: impl Fn(Rank) -> Rank, other: &Inner) -> Error {
    let text = format!("another group of this rank has failed: {}", cause.clone().without_remedy());
    let member = |rank| {
        let global = global(rank);
        other.world.ranks().find(|rank| other.config.global(*rank) == global)
    };
    let error = match cause.peer().and_then(member) {
        Some(peer) => Error::new(cause.kind(), text).with_peer(peer),
        // Not this group's peer: for the others of this group it is this rank that ends it.
        None if cause.peer().is_some() => Error::new(Kind::Aborted, text),
        None => Error::new(cause.kind(), text),
    };
    let error = cause.remedy().into_iter().fold(error, Error::with_remedy);
    // It is the same rank that has failed, whoever says so first.
    match cause.rank().and_then(member) {
        Some(rank) => error.at(rank, other.health.host(rank)),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::buffer::Buffer;
    use crate::dtype::DType;
    use crate::rank::Rank;
    use crate::world_size::WorldSize;

    #[test]
    fn the_failure_of_a_group_is_known_however_many_others_there_are_and_not_all_of_those_that_are_gone() {
        let group = ProcessGroup::in_process(WorldSize::ONE).unwrap().remove(0);
        let make = || group.new_group(&[Rank::MAIN]).unwrap().unwrap();
        let parts: Vec<ProcessGroup> = (0..MAX_FAILURES + 10).map(|_| make()).collect();
        assert!(group.failure_in_family(|_| true).is_none());
        parts[0].abort(Error::aborted("the first"));
        assert!(group.failure_in_family(|cause| cause.to_string().contains("the first")).is_some());
        for _ in 0..MAX_FAILURES + 10 {
            make().abort(Error::aborted("one that is gone"));
        }
        let kept = group.inner.config.family.failures.lock().len();
        assert!(kept <= 1 + parts.len() + MAX_FAILURES + 2, "{kept}");
        assert!(group.failure_in_family(|cause| cause.to_string().contains("the first")).is_some());
    }

    #[test]
    fn the_failure_of_a_smaller_group_blames_the_same_rank_in_the_whole_one() {
        /// How a rank of the smaller group, the second argument, ends the whole one with its error.
        type End = fn(&ProcessGroup, &ProcessGroup, Error);
        let ends: [End; 3] = [
            |whole, _, error| whole.abort(error),
            |whole, _, error| whole.irecv(Buffer::zeroed(DType::U8, 1), Rank::MAIN).unwrap().abort(error),
            |_, smaller, error| smaller.abort_all(error),
        ];
        for end in ends {
            let groups = ProcessGroup::in_process(WorldSize::new(4).unwrap()).unwrap();
            let all_are_here = Barrier::new(groups.len());
            std::thread::scope(|scope| {
                for group in groups {
                    let all_are_here = &all_are_here;
                    scope.spawn(move || {
                        let part = group.new_group(&[Rank::new(2), Rank::new(3)]).unwrap();
                        // None ends the whole group while another is still in that call.
                        all_are_here.wait();
                        match (group.rank().get(), &part) {
                            (3, Some(part)) => part.abort(Error::aborted("the fault of the test")),
                            (2, Some(part)) => {
                                let error = part.barrier().unwrap_err();
                                assert_eq!(error.rank(), Some(Rank::new(1)), "{error}");
                                end(&group, part, error);
                                assert!(group.was_aborted());
                            }
                            (0 | 1, _) | (_, None) | (4.., _) => {}
                        }
                        let error = group.barrier().unwrap_err();
                        assert_eq!(error.rank(), Some(Rank::new(3)), "{error}");
                        assert!(error.to_string().contains("the fault of the test"), "{error}");
                    });
                }
            });
        }
    }
}
