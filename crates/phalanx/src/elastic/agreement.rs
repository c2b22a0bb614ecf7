//! How ranks see that their states are equal, and make them so.

use super::Drift;
use super::parts::{Part, Summary};
use super::snapshot::Snapshot;
use crate::collective::ReduceOp;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::rank::Rank;

/// How many parts and ranks an error names.
const NAMED: usize = 8;

/// What a rank brings to a meeting: is a worker waiting, its number of commits, and the digest of its snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Word {
    awaited: bool,
    commits: u64,
    digest: u64,
}

const WORD: usize = 3;

/// What a commit has shown.
#[derive(Debug)]
pub(super) struct Committed {
    /// Do workers wait for whom a new group is to be made? The same on every rank.
    pub(super) awaited: bool,
    /// Has the snapshot changed, because this rank had drifted?
    pub(super) repaired: bool,
}

/// All ranks have made their snapshots: are they equal? One collective of 24 bytes a rank, if they are.
pub(super) fn commit(
    group: &ProcessGroup,
    snapshot: &mut Snapshot,
    awaited: bool,
    drift: Drift,
) -> Result<Committed> {
    let own = Word { awaited, commits: snapshot.commits, digest: snapshot.digest(drift) };
    let words = exchange(group, own)?;
    let awaited = words.iter().any(|word| word.awaited);
    if words.iter().any(|word| word.commits != own.commits) {
        let commits: Vec<u64> = words.iter().map(|word| word.commits).collect();
        return Err(Error::mismatch(format!("ranks are at different commits: {commits:?}"))
            .with_remedy("every rank must call commit equally often"));
    }
    if words.iter().all(|word| word.digest == words[0].digest) {
        return Ok(Committed { awaited, repaired: false });
    }
    if drift == Drift::Repair {
        let root = most_common(&words);
        tracing::warn!(
            commit = own.commits,
            root,
            "replicas have drifted apart, and all take the state of one rank"
        );
        let repaired = take_from(group, snapshot, rank(root))?;
        return Ok(Committed { awaited, repaired });
    }
    Err(drifted(group.all_gather_object(&snapshot.summaries().to_vec())?, own.commits))
}

/// Gives every rank the snapshot of the one with most commits, the lowest of several. True if this rank's has changed.
pub(super) fn sync(group: &ProcessGroup, snapshot: &mut Snapshot) -> Result<bool> {
    let own = Word { awaited: false, commits: snapshot.commits, digest: snapshot.digest(Drift::Fail) };
    let words = exchange(group, own)?;
    let root = furthest(&words);
    // Equal on all ranks: then nothing is sent.
    if words.iter().all(|word| *word == words[root]) {
        return Ok(false);
    }
    let changed = take_from(group, snapshot, rank(root))?;
    snapshot.commits = words[root].commits;
    Ok(changed)
}

/// Gives every rank the parts of the root's snapshot that differ from its own; true if any did.
pub(super) fn take_from(group: &ProcessGroup, snapshot: &mut Snapshot, root: Rank) -> Result<bool> {
    let is_root = group.rank() == root;
    let own = snapshot.summaries().to_vec();
    let wanted: Vec<Summary> = group.broadcast_object(is_root.then_some(&own), root)?;
    let mut lacking: Vec<u8> = wanted.iter().map(|part| u8::from(!own.contains(part))).collect();
    let here = lacking.clone();
    group.all_reduce(&mut lacking, ReduceOp::Max)?;
    // Received beside what is there: if the root dies in the middle, the last commit is still whole.
    let mut received = Vec::new();
    for (index, part) in wanted.iter().enumerate().filter(|(index, _)| lacking[*index] == 1) {
        match snapshot.parts.find_mut(&part.name) {
            // The same bytes as are there.
            Some(held) if here[index] == 0 => group.broadcast(&mut held.bytes, root)?,
            _ => {
                let mut part = Part::zeroed(&part.name, part.length)?;
                group.broadcast(&mut part.bytes, root)?;
                received.push(part);
            }
        }
    }
    // Parts that the root no longer has are no longer part of the state, and their order is part of its digest.
    snapshot.parts.rebuild(&wanted, received);
    snapshot.changed();
    Ok(own != wanted)
}

fn exchange(group: &ProcessGroup, word: Word) -> Result<Vec<Word>> {
    let sent = [i64::from(word.awaited), word.commits.cast_signed(), word.digest.cast_signed()];
    let mut received = vec![0_i64; WORD * group.world_size().count()];
    group.all_gather(&sent, &mut received)?;
    let word = |word: &[i64]| Word {
        awaited: word[0] != 0,
        commits: word[1].cast_unsigned(),
        digest: word[2].cast_unsigned(),
    };
    Ok(received.chunks_exact(WORD).map(word).collect())
}

fn rank(index: usize) -> Rank {
    Rank::new(u32::try_from(index).unwrap_or(u32::MAX))
}

fn furthest(words: &[Word]) -> usize {
    let most = words.iter().map(|word| word.commits).max();
    words.iter().position(|word| Some(word.commits) == most).unwrap_or(0)
}

fn most_common(words: &[Word]) -> usize {
    let count = |digest| words.iter().filter(|word| word.digest == digest).count();
    let most = words.iter().map(|word| count(word.digest)).max();
    words.iter().position(|word| Some(count(word.digest)) == most).unwrap_or(0)
}

/// The error that names what differs, and on which ranks. Each rank is compared with what most ranks have.
fn drifted(summaries: Vec<Vec<Summary>>, commit: u64) -> Error {
    let mut parts: Vec<String> = Vec::new();
    let mut names: Vec<&str> = Vec::new();
    for part in summaries.iter().flatten() {
        if !names.contains(&part.name.as_str()) {
            names.push(&part.name);
        }
    }
    for name in names {
        let of = |rank: &Vec<Summary>| rank.iter().find(|part| part.name == name).cloned();
        let versions: Vec<Option<Summary>> = summaries.iter().map(of).collect();
        let count = |version: &Option<Summary>| versions.iter().filter(|other| *other == version).count();
        let most = versions.iter().map(count).max();
        let usual = versions.iter().find(|version| Some(count(version)) == most);
        let others: Vec<String> = (0..)
            .zip(&versions)
            .filter(|(_, version)| Some(*version) != usual)
            .map(|(rank, _): (usize, _)| rank.to_string())
            .collect();
        if !others.is_empty() {
            let more = if others.len() > NAMED { " and more" } else { "" };
            let ranks = others[..others.len().min(NAMED)].join(", ");
            let s = if others.len() > 1 { "s" } else { "" };
            parts.push(format!("{name:?} differs on rank{s} {ranks}{more}"));
        }
    }
    let more = parts.len().saturating_sub(NAMED);
    parts.truncate(NAMED);
    if parts.is_empty() {
        parts.push("the parts come in different orders".to_owned());
    }
    if more > 0 {
        parts.push(format!("{more} more parts differ"));
    }
    Error::mismatch(format!("replicas have drifted apart at commit {commit}: {}", parts.join("; "))).with_remedy(
        "does each rank start from the same state, average all gradients, and step alike? Drift::Repair goes on with \
         what most ranks have",
    )
}

#[cfg(test)]
mod tests {
    use super::super::{Parts, State};
    use super::*;
    use crate::rank::WorldSize;

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
        let outcomes = on_ranks(&states, |group, snapshot, _| sync(group, snapshot).unwrap());
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [true, false, false, true]);
        assert!(outcomes.iter().all(|(_, commits, state)| (*commits, state) == (4, &named(b"newer", 4))));
        // The lowest rank, if nobody has made a commit.
        let states = [(0, named(b"a", 1)), (0, named(b"b", 1))];
        let outcomes = on_ranks(&states, |group, snapshot, _| sync(group, snapshot).unwrap());
        assert_eq!(outcomes.iter().map(|outcome| outcome.0).collect::<Vec<_>>(), [false, true]);
        assert!(outcomes.iter().all(|outcome| outcome.2 == states[0].1));
    }

    #[test]
    fn parts_that_the_root_no_longer_has_are_gone() {
        let (root, old) = (
            Named(vec![("weights", b"new".to_vec()), ("step", vec![2])]),
            Named(vec![("warm-up", vec![7]), ("step", vec![2]), ("weights", b"new".to_vec())]),
        );
        let outcomes = on_ranks(&[(2, root), (1, old)], |group, snapshot, state| {
            let changed = sync(group, snapshot).unwrap();
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
    fn all_hear_at_the_same_commit_that_somebody_waits() {
        let states = [(1, named(b"x", 1)), (1, named(b"x", 1))];
        let outcomes = on_ranks(&states, |group, snapshot, _| {
            let knows = group.rank().get() == 1;
            commit(group, snapshot, knows, Drift::Fail).unwrap().awaited
        });
        assert!(outcomes.iter().all(|outcome| outcome.0));
    }

    #[test]
    fn commits_that_are_not_the_same_are_told_apart() {
        let states = [(1, named(b"x", 1)), (2, named(b"x", 1))];
        let outcomes =
            on_ranks(&states, |group, snapshot, _| commit(group, snapshot, false, Drift::Fail).unwrap_err());
        assert!(outcomes.iter().all(|outcome| outcome.0.to_string().contains("[1, 2]")));
    }
}
