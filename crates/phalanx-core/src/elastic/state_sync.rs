//! How ranks check that their states are equal, and make them equal.
//!
//! A snapshot is taken before the ranks compare it. A rank that completes the comparison knows that all have the
//! snapshot, so a commit that has returned on any rank is lost only with all ranks. Data of another rank are received
//! beside the snapshot, so a root that dies in the middle does no harm.

use std::ops::Range;

use super::Drift;
use super::commits::{self, Agreement, CommitReport, Summary};
use super::parts::Part;
use super::snapshot::Snapshot;
use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::notice::warn;
use crate::rank::Rank;

/// So many bytes at most go in one broadcast of several parts. Among four hosts or more a long one takes as many trips over the network as
/// there are hosts, and a model has hundreds of parts.
const TOGETHER: u64 = 16 << 20;

impl Snapshot {
    fn report(&mut self, workers_wait: bool, drift: Drift) -> CommitReport {
        let (commits, round) = (self.commits, self.round);
        CommitReport { workers_wait, drift, commits, round, digest: self.digest(drift) }
    }
}

/// The result of comparing a commit.
#[derive(Debug)]
pub(super) struct Committed {
    /// Whether workers wait, so that a new group must be formed. The same on every rank.
    pub(super) workers_wait: bool,
    /// Whether the snapshot of this rank was replaced, because it had drifted.
    pub(super) repaired: bool,
}

/// All ranks have made their snapshots. Checks that they are equal, with one collective of 32 bytes a rank if they are.
pub(super) fn commit(
    group: &ProcessGroup,
    snapshot: &mut Snapshot,
    workers_wait: bool,
    drift: Drift,
) -> Result<Committed> {
    let own = snapshot.report(workers_wait, drift);
    let reports = exchange(group, own)?;
    let workers_wait = reports.iter().any(|report| report.workers_wait);
    match commits::commit(own, &reports, drift)? {
        Agreement::Equal => Ok(Committed { workers_wait, repaired: false }),
        Agreement::Drifted(ranks) => {
            Err(drifted_apart(group, snapshot, &commits::compared(&reports, &ranks), own.commits)?)
        }
        Agreement::Take { root, commits, .. } => {
            if group.rank().is_main() {
                warn(format_args!(
                    "at commit {commits} replicas have drifted apart; all take the state of rank {root}"
                ));
            }
            let repaired = take_from(group, snapshot, rank(root))?;
            // A commit that has returned is on every rank: no rank returns before all snapshots are repaired. Otherwise,
            // after a failure now, only the ranks of the majority would have it.
            group.barrier()?;
            Ok(Committed { workers_wait, repaired })
        }
    }
}

/// Gives every rank the snapshot of the latest commit. Returns true if this rank's snapshot has changed.
pub(super) fn sync(group: &ProcessGroup, snapshot: &mut Snapshot, drift: Drift) -> Result<bool> {
    // Also if drift is ignored: the hashes decide what is sent.
    let own = CommitReport { digest: snapshot.digest(Drift::Fail), ..snapshot.report(false, drift) };
    let reports = exchange(group, own)?;
    match commits::sync(&reports, drift) {
        Agreement::Equal => Ok(false),
        Agreement::Drifted(ranks) => {
            let commits =
                ranks.first().and_then(|rank| reports.get(*rank)).map_or(0, |report| report.commits);
            Err(drifted_apart(group, snapshot, &commits::compared(&reports, &ranks), commits)?)
        }
        Agreement::Take { root, commits, round } => {
            let changed = take_from(group, snapshot, rank(root))?;
            (snapshot.commits, snapshot.round) = (commits, round);
            Ok(changed)
        }
    }
}

/// The error of the ranks that have made this commit, and differ: the parts of these `ranks` are compared.
fn drifted_apart(
    group: &ProcessGroup,
    snapshot: &mut Snapshot,
    ranks: &[usize],
    commit: u64,
) -> Result<Error> {
    let own = match ranks.contains(&group.rank().index()) {
        true => snapshot.summaries().to_vec(),
        false => Vec::new(),
    };
    let summaries = group.all_gather_object(&own)?;
    let held = summaries.into_iter().enumerate().filter(|(rank, _)| ranks.contains(rank));
    Ok(commits::drifted(held.collect(), commit))
}

/// Gives every rank the parts of the root's snapshot that differ from its own. Returns true if any did.
pub(super) fn take_from(group: &ProcessGroup, snapshot: &mut Snapshot, root: Rank) -> Result<bool> {
    let is_root = group.rank() == root;
    let own = snapshot.summaries().to_vec();
    let wanted: Vec<Summary> = group.broadcast_object(is_root.then_some(&own), root)?;
    let mut lacking: Vec<u8> = wanted.iter().map(|part| u8::from(!own.contains(part))).collect();
    let here = lacking.clone();
    group.all_reduce(&mut lacking, ReduceOp::Max)?;
    // Received into other memory: if the root dies during the transfer, the last commit is still complete.
    let mut received = Vec::new();
    for batch in batches(&wanted, &lacking) {
        let Some((index, _)) = batch.first() else { continue };
        let part = &wanted[*index];
        if batch.len() == 1 {
            match snapshot.parts.find_mut(&part.name) {
                // This rank has the same bytes.
                Some(held) if here[*index] == 0 => group.broadcast(&mut held.bytes, root)?,
                _ => {
                    let mut part = Part::zeroed(&part.name, part.length)?;
                    group.broadcast(&mut part.bytes, root)?;
                    received.push(part);
                }
            }
            continue;
        }
        let end = batch.last().map_or(0, |(_, place)| place.end);
        let mut together = Part::zeroed(&part.name, end as u64)?.bytes;
        for (index, place) in batch.iter().filter(|_| is_root) {
            if let Some(held) = snapshot.parts.find_mut(&wanted[*index].name) {
                together[place.clone()].copy_from_slice(&held.bytes);
            }
        }
        group.broadcast(&mut together, root)?;
        for (index, place) in batch.into_iter().filter(|(index, _)| here[*index] == 1) {
            let mut part = Part::zeroed(&wanted[index].name, wanted[index].length)?;
            part.bytes.copy_from_slice(&together[place]);
            received.push(part);
        }
    }
    // Parts that the root no longer has are removed. The order of parts is a part of the digest.
    snapshot.parts.rebuild(&wanted, received);
    snapshot.changed();
    Ok(own != wanted)
}

/// Which of the `wanted` parts that are `lacking` go together, each with its place there; one that goes alone may be longer.
fn batches(wanted: &[Summary], lacking: &[u8]) -> Vec<Vec<(usize, Range<usize>)>> {
    let (mut batches, mut end): (Vec<Vec<_>>, u64) = (Vec::new(), 0);
    for (index, part) in wanted.iter().enumerate().filter(|(index, _)| lacking[*index] == 1) {
        let start = if end.saturating_add(part.length) <= TOGETHER { end } else { 0 };
        end = start.saturating_add(part.length);
        let place = start as usize..end as usize;
        match batches.last_mut() {
            Some(batch) if start > 0 => batch.push((index, place)),
            _ => batches.push(vec![(index, place)]),
        }
    }
    batches
}

fn exchange(group: &ProcessGroup, report: CommitReport) -> Result<Vec<CommitReport>> {
    let mut received = vec![0_i64; CommitReport::NUMBERS * group.world_size().count()];
    group.all_gather(&report.encode(), &mut received)?;
    let numbers = received.as_chunks::<{ CommitReport::NUMBERS }>().0;
    let reports = numbers.iter().map(|numbers| CommitReport::decode(*numbers)).collect::<Result<Vec<_>>>()?;
    commits::check_drift(&reports)?;
    Ok(reports)
}

fn rank(index: usize) -> Rank {
    Rank::new(u32::try_from(index).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::super::{Parts, State};
    use super::*;
    use crate::world_size::WorldSize;

    /// Parts by name.
    #[derive(Clone, Debug, PartialEq)]
    struct Named(Vec<(&'static str, Vec<u8>)>);

    impl State for Named {
        fn save(&self, parts: &mut Parts) -> Result<()> {
            self.0.iter().try_for_each(|(name, bytes)| parts.put(name, bytes))
        }

        fn load(&mut self, parts: &Parts) -> Result<()> {
            for (name, bytes) in &mut self.0 {
                *bytes = parts.bytes(name)?.to_vec();
            }
            Ok(())
        }
    }

    /// `act` on each rank's state and commits, by rank.
    fn on_ranks<T: Send>(
        states: &[(u64, Named)],
        act: impl Fn(&ProcessGroup, &mut Snapshot, &mut Named) -> T + Sync,
    ) -> Vec<(T, u64, Named)> {
        let world = WorldSize::new(u32::try_from(states.len()).unwrap()).unwrap();
        std::thread::scope(|scope| {
            let ranks =
                ProcessGroup::in_process(world).unwrap().into_iter().zip(states).map(|(group, state)| {
                    let act = &act;
                    scope.spawn(move || {
                        let (commits, mut state) = state.clone();
                        let mut snapshot = Snapshot::of(&state).unwrap();
                        snapshot.commits = commits;
                        let outcome = act(&group, &mut snapshot, &mut state);
                        state.load(&snapshot.parts).unwrap();
                        (outcome, snapshot.commits, state)
                    })
                });
            ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn named(weights: &[u8], step: u8) -> Named {
        Named(vec![("weights", weights.to_vec()), ("step", vec![step])])
    }

    #[test]
    fn all_get_what_the_one_with_most_commits_has() {
        let states =
            [(3, named(b"old", 3)), (4, named(b"newer", 4)), (4, named(b"newer", 4)), (0, named(b"", 0))];
        let outcomes = on_ranks(&states, |group, snapshot, _| sync(group, snapshot, Drift::Fail).unwrap());
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [true, false, false, true]);
        assert!(outcomes.iter().all(|(_, commits, state)| (*commits, state) == (4, &named(b"newer", 4))));
        // The lowest rank, if no rank has made a commit.
        let states = [(0, named(b"a", 1)), (0, named(b"b", 1))];
        let outcomes = on_ranks(&states, |group, snapshot, _| sync(group, snapshot, Drift::Fail).unwrap());
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [false, true]);
        assert!(outcomes.iter().all(|outcome| outcome.2 == states[0].1));
    }

    #[test]
    fn parts_that_ranks_lack_go_together_and_long_ones_alone() {
        let summary = |length| Summary { name: String::new(), length, hash: 0 };
        let wanted = [1, TOGETHER, 2, 0, 3, TOGETHER - 5].map(summary);
        let of = |lacking: [u8; 6]| -> Vec<Vec<(usize, Range<usize>)>> { batches(&wanted, &lacking) };
        let most = TOGETHER as usize;
        assert_eq!(
            of([1; 6]),
            [vec![(0, 0..1)], vec![(1, 0..most)], vec![(2, 0..2), (3, 2..2), (4, 2..5), (5, 5..most)]]
        );
        assert_eq!(of([1, 0, 1, 0, 1, 0]), [vec![(0, 0..1), (2, 1..3), (4, 3..6)]]);
        assert!(of([0; 6]).is_empty());
    }

    #[test]
    fn parts_of_which_a_rank_lacks_some_come_together() {
        let part = |name, byte, length| (name, vec![byte; length]);
        let root = Named(vec![part("a", 1, 300), part("b", 2, 0), part("c", 3, 70_000), part("d", 4, 5)]);
        let lacks_one =
            Named(vec![part("a", 1, 300), part("b", 2, 0), part("c", 9, 70_000), part("d", 4, 5)]);
        let lacks_all = Named(vec![part("a", 9, 1), part("b", 9, 1), part("c", 9, 1), part("d", 9, 1)]);
        let states = [(1, lacks_all), (2, root.clone()), (1, lacks_one)];
        let outcomes = on_ranks(&states, |group, snapshot, _| sync(group, snapshot, Drift::Fail).unwrap());
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [true, false, true]);
        assert!(outcomes.iter().all(|outcome| outcome.2 == root));
    }

    #[test]
    fn parts_that_the_root_no_longer_has_are_gone() {
        let (root, old) = (
            Named(vec![("weights", b"new".to_vec()), ("step", vec![2])]),
            Named(vec![("warm-up", vec![7]), ("step", vec![2]), ("weights", b"new".to_vec())]),
        );
        let outcomes = on_ranks(&[(2, root), (1, old)], |group, snapshot, state| {
            let changed = sync(group, snapshot, Drift::Fail).unwrap();
            // Not loaded again: it is no state that asks for other parts.
            state.0.clear();
            (changed, snapshot.summaries().to_vec())
        });
        let [((root_changed, root), ..), ((changed, other), ..)] = outcomes.as_slice() else {
            panic!("two ranks")
        };
        assert!(!root_changed && *changed);
        assert_eq!(root, other);
    }

    #[test]
    fn drift_is_named_on_every_rank() {
        let states = [(1, named(b"x", 1)), (1, named(b"y", 1)), (1, named(b"x", 1))];
        let outcomes =
            on_ranks(&states, |group, snapshot, _| commit(group, snapshot, false, Drift::Fail).unwrap_err());
        for (error, ..) in outcomes {
            assert!(error.is_mismatch(), "{error}");
            let text = error.to_string();
            assert!(text.contains("\"weights\" differs on rank 1") && !text.contains("\"step\""), "{text}");
        }
    }

    #[test]
    fn ranks_with_other_options_of_drift_are_named_before_anything_has_drifted() {
        let states = [(1, named(b"x", 1)), (1, named(b"x", 1)), (1, named(b"x", 1))];
        for syncs in [true, false] {
            let outcomes = on_ranks(&states, |group, snapshot, _| {
                let drift = if group.rank().get() == 1 { Drift::Ignore } else { Drift::Fail };
                match syncs {
                    true => sync(group, snapshot, drift).unwrap_err(),
                    false => commit(group, snapshot, false, drift).unwrap_err(),
                }
            });
            for (error, ..) in outcomes {
                let text = error.to_string();
                assert!(error.is_mismatch() && text.contains("and rank 1 Drift::Ignore"), "{text}");
            }
        }
    }

    #[test]
    fn drift_is_repaired_from_most_or_ignored() {
        let states = [(1, named(b"y", 1)), (1, named(b"x", 1)), (1, named(b"x", 1))];
        let with = |drift| {
            on_ranks(&states, move |group, snapshot, _| {
                commit(group, snapshot, false, drift).unwrap().repaired
            })
        };
        let outcomes = with(Drift::Repair);
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [true, false, false]);
        assert!(outcomes.iter().all(|outcome| outcome.2 == states[1].1));
        assert!(
            with(Drift::Ignore)
                .iter()
                .zip(&states)
                .all(|(outcome, state)| !outcome.0 && outcome.2 == state.1)
        );
    }

    #[test]
    fn drift_that_no_commit_could_see_is_seen_by_the_next_group() {
        // Rank 0 has come anew; of the others, who made commit 2 together, rank 1 has drifted.
        let states = [(0, named(b"", 0)), (2, named(b"y", 2)), (2, named(b"x", 2)), (2, named(b"x", 2))];
        let with = |drift| on_ranks(&states, move |group, snapshot, _| sync(group, snapshot, drift));
        for (outcome, ..) in with(Drift::Fail) {
            let error = outcome.unwrap_err();
            assert!(error.is_mismatch(), "{error}");
            let text = error.to_string();
            assert!(text.contains("\"weights\" differs on rank 1") && !text.contains("\"step\""), "{text}");
        }
        for (drift, holder) in [(Drift::Repair, 2), (Drift::Ignore, 1)] {
            let outcomes = with(drift);
            assert!(outcomes.iter().all(|(outcome, ..)| outcome.is_ok()));
            assert!(outcomes.iter().all(|(_, commits, state)| (*commits, state) == (2, &states[holder].1)));
        }
    }

    #[test]
    fn of_equally_many_commits_the_later_round_has_the_one_that_returned() {
        // Rank 0 froze with a commit of round 1 that the others never got; they made their own in round 2.
        let states = [(4, named(b"frozen", 4)), (4, named(b"went on", 4)), (4, named(b"went on", 4))];
        let outcomes = on_ranks(&states, |group, snapshot, _| {
            snapshot.round = if group.rank().get() == 0 { 1 } else { 2 };
            (sync(group, snapshot, Drift::Fail).unwrap(), snapshot.round)
        });
        assert_eq!(
            outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(),
            [(true, 2), (false, 2), (false, 2)]
        );
        assert!(outcomes.iter().all(|outcome| outcome.2 == states[1].1));
    }

    #[test]
    fn a_repair_that_is_not_whole_on_every_rank_is_no_commit() {
        let states = [(1, named(b"y", 1)), (1, named(b"x", 1)), (1, named(b"x", 1))];
        let outcomes = on_ranks(&states, |group, snapshot, _| {
            if group.rank() != Rank::MAIN {
                return commit(group, snapshot, false, Drift::Repair).map(|committed| committed.repaired);
            }
            // It dies when the others have sent all that it lacks.
            let own = snapshot.report(false, Drift::Repair);
            exchange(group, own)?;
            take_from(group, snapshot, Rank::new(1))?;
            group.abort(Error::aborted("it died"));
            Ok(true)
        });
        assert!(
            outcomes[0].0.is_ok() && outcomes[1..].iter().all(|outcome| outcome.0.is_err()),
            "{outcomes:?}"
        );
    }

    #[test]
    fn all_hear_at_the_same_commit_that_somebody_waits() {
        let states = [(1, named(b"x", 1)), (1, named(b"x", 1))];
        let outcomes = on_ranks(&states, |group, snapshot, _| {
            let knows = group.rank().get() == 1;
            commit(group, snapshot, knows, Drift::Fail).unwrap().workers_wait
        });
        assert!(outcomes.iter().all(|outcome| outcome.0));
    }

    #[test]
    fn commits_that_are_not_the_same_are_told_apart() {
        let states = [(1, named(b"x", 1)), (2, named(b"x", 1))];
        let outcomes =
            on_ranks(&states, |group, snapshot, _| commit(group, snapshot, false, Drift::Fail).unwrap_err());
        assert!(
            outcomes.iter().all(|outcome| outcome.0.to_string().contains("rank 0 is at 1, and rank 1 at 2"))
        );
    }
}
