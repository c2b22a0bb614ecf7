//! Which commit all ranks go on from, and whether their states agree: pure.
//!
//! Each rank reports its last commit and the digest of its state ([`CommitReport`]), and each comes to the same decision.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::rank::Rank;

/// How many parts and ranks an error names.
const NAMED: usize = 8;

/// What to do about replicas that have drifted apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Drift {
    /// An error on every rank, which names the part and the ranks.
    #[default]
    Fail,
    /// All take the state that most ranks have; if two are equally frequent, that of the lowest rank.
    Repair,
    /// Drift is not looked for: a commit (`Context::commit`) computes no hashes.
    Ignore,
}

impl Drift {
    /// Each, at its number on the wire.
    const ALL: [Self; 3] = [Self::Fail, Self::Repair, Self::Ignore];
}

/// What a rank reports before a commit or a synchronization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitReport {
    /// Whether a worker waits to join.
    pub workers_wait: bool,
    /// What it does about drift.
    pub drift: Drift,
    /// How many commits have led to its state.
    pub commits: u64,
    /// The round of the last one, or 0.
    pub round: u64,
    /// The digest of its state.
    pub digest: u64,
}

impl CommitReport {
    /// The length of an encoded report.
    pub const NUMBERS: usize = 4;

    /// The report as numbers.
    pub fn encode(self) -> [i64; Self::NUMBERS] {
        let [commits, round, digest] = [self.commits, self.round, self.digest].map(u64::cast_signed);
        [i64::from(self.workers_wait) | ((self.drift as i64) << 1), commits, round, digest]
    }

    /// The report that was encoded as these numbers.
    ///
    /// # Errors
    /// If no report is.
    pub fn decode(numbers: [i64; Self::NUMBERS]) -> Result<Self> {
        let [flags, commits, round, digest] = numbers.map(i64::cast_unsigned);
        let drift = usize::try_from(flags >> 1).ok().and_then(|number| Drift::ALL.get(number));
        let drift =
            *drift.ok_or_else(|| Error::malformed(format!("a commit's report begins with {flags:#x}")))?;
        Ok(Self { workers_wait: flags & 1 != 0, drift, commits, round, digest })
    }

    /// The order of commits: the later one is greater. If two ranks have the same number of commits, the commit of the
    /// later round is greater. Only that one may have returned: the group of the earlier round failed before all its
    /// ranks had theirs.
    fn commit(&self) -> (u64, u64) {
        (self.commits, self.round)
    }
}

/// What the ranks do about their states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Nothing: they are equal.
    Equal,
    /// All take the state of the rank of this index, by its number of commits and their last round.
    Take {
        /// Whose state it is.
        root: usize,
        /// How many commits have led to it.
        commits: u64,
        /// The round of the last one.
        round: u64,
    },
    /// Nothing: these ranks, of the same commit, have drifted apart, which is an error.
    Drifted(Vec<usize>),
}

/// Checks that all ranks do the same about drift: otherwise some would take a state that others do not send.
///
/// # Errors
/// With two that do not.
pub fn check_drift(reports: &[CommitReport]) -> Result<()> {
    let Some((first, others)) = reports.split_first() else { return Ok(()) };
    match others.iter().zip(1..).find(|(other, _)| other.drift != first.drift) {
        None => Ok(()),
        Some((other, rank)) => Err(Error::mismatch(format!(
            "rank 0 has Drift::{:?} among its elastic::Options, and rank {rank} Drift::{:?}",
            first.drift, other.drift
        ))
        .with_peer(Rank::new(rank))
        .with_remedy("give every rank the same Options::drift")),
    }
}

/// All ranks have made a commit, and one of them `own`.
///
/// # Errors
/// If they have made different numbers of commits.
pub fn commit(own: CommitReport, reports: &[CommitReport], drift: Drift) -> Result<Agreement> {
    if let Some((first, others)) = reports.split_first()
        && let Some((other, rank)) = others.iter().zip(1..).find(|(other, _)| other.commits != first.commits)
    {
        let (first, other) = (first.commits, other.commits);
        return Err(Error::mismatch(format!(
            "ranks are at different commits: rank 0 is at {first}, and rank {rank} at {other}"
        ))
        .with_remedy("every rank must call commit equally often"));
    }
    if reports.iter().all(|report| report.digest == own.digest) {
        return Ok(Agreement::Equal);
    }
    let all: Vec<usize> = (0..reports.len()).collect();
    Ok(match drift {
        Drift::Repair => take(most_common(reports, &all), reports),
        Drift::Fail | Drift::Ignore => Agreement::Drifted(all),
    })
}

/// A new group has formed: all ranks take the state of the latest commit.
pub fn sync(reports: &[CommitReport], drift: Drift) -> Agreement {
    let holders = furthest(reports);
    let Some(&lowest) = holders.first() else { return Agreement::Equal };
    if reports.iter().all(|report| *report == reports[lowest]) {
        return Agreement::Equal;
    }
    // The failure may have come before the ranks compared this commit. Before the first commit there is nothing to
    // compare: workers may begin with different states.
    let drifted_apart = reports[lowest].commits > 0
        && drift != Drift::Ignore
        && holders.iter().any(|holder| reports[*holder].digest != reports[lowest].digest);
    match drift {
        Drift::Fail if drifted_apart => Agreement::Drifted(holders),
        _ if drifted_apart => take(most_common(reports, &holders), reports),
        _ => take(lowest, reports),
    }
}

fn take(root: usize, reports: &[CommitReport]) -> Agreement {
    let (commits, round) = reports.get(root).map(CommitReport::commit).unwrap_or_default();
    Agreement::Take { root, commits, round }
}

/// The ranks that have the latest commit.
fn furthest(reports: &[CommitReport]) -> Vec<usize> {
    let latest = reports.iter().map(CommitReport::commit).max();
    (0..reports.len()).filter(|rank| Some(reports[*rank].commit()) == latest).collect()
}

/// The lowest of those `ranks` whose digest is the most frequent.
fn most_common(reports: &[CommitReport], ranks: &[usize]) -> usize {
    let count = |of: usize| ranks.iter().filter(|rank| reports[**rank].digest == reports[of].digest).count();
    let most = ranks.iter().map(|rank| count(*rank)).max();
    ranks.iter().copied().find(|rank| Some(count(*rank)) == most).unwrap_or(0)
}

/// Those of the `ranks` that have drifted apart whose parts are compared for the error: the first of those whose state is the most frequent, one more
/// than of the others, and so many of these as are named and one more. To compare those of all is work of the square of the ranks, for each part.
pub fn compared(reports: &[CommitReport], ranks: &[usize]) -> Vec<usize> {
    let digest = |rank: usize| reports.get(rank).map(|report| report.digest);
    let usual = digest(most_common(reports, ranks));
    let (alike, others): (Vec<usize>, Vec<usize>) =
        ranks.iter().copied().partition(|rank| digest(*rank) == usual);
    let mut compared: Vec<usize> =
        alike.into_iter().take(NAMED + 2).chain(others.into_iter().take(NAMED + 1)).collect();
    compared.sort_unstable();
    compared
}

/// What identifies a part of a state without its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// Its name.
    pub name: String,
    /// Its number of bytes.
    pub length: u64,
    /// The hash of its bytes.
    pub hash: u64,
}

/// The error that names the parts that differ and the ranks, of which each has these parts. Each part is compared with the most
/// frequent one.
pub fn drifted(held: Vec<(usize, Vec<Summary>)>, commit: u64) -> Error {
    let (ranks, summaries): (Vec<usize>, Vec<Vec<Summary>>) = held.into_iter().unzip();
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
        let others: Vec<String> = ranks
            .iter()
            .zip(&versions)
            .filter(|(_, version)| Some(*version) != usual)
            .map(|(rank, _)| rank.to_string())
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
    use super::*;

    /// A rank after so many commits, the last one in this round, with this digest.
    fn of(commits: u64, round: u64, digest: u64) -> CommitReport {
        CommitReport { workers_wait: false, drift: Drift::Fail, commits, round, digest }
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        for report in [of(0, 0, 0), of(1, 2, u64::MAX), CommitReport { workers_wait: true, ..of(7, 8, 9) }] {
            for drift in Drift::ALL {
                let report = CommitReport { drift, ..report };
                assert_eq!(CommitReport::decode(report.encode()).unwrap(), report);
            }
        }
        for flags in [6, i64::MAX, -1] {
            assert!(CommitReport::decode([flags, 0, 0, 0]).is_err());
        }
    }

    #[test]
    fn ranks_that_treat_drift_in_different_ways_are_named() {
        let with = |drift| CommitReport { drift, ..of(1, 1, 5) };
        for drift in Drift::ALL {
            check_drift(&[with(drift); 3]).unwrap();
        }
        check_drift(&[]).unwrap();
        let error =
            check_drift(&[with(Drift::Ignore), with(Drift::Ignore), with(Drift::Repair)]).unwrap_err();
        assert!(error.is_mismatch() && error.peer() == Some(Rank::new(2)), "{error}");
        assert!(error.to_string().contains("rank 0 has Drift::Ignore"), "{error}");
        assert!(error.to_string().contains("rank 2 Drift::Repair"), "{error}");
    }

    #[test]
    fn a_commit_counts_if_all_are_at_it_and_alike() {
        let alike = [of(3, 1, 5), of(3, 1, 5)];
        assert_eq!(commit(alike[0], &alike, Drift::Fail).unwrap(), Agreement::Equal);
        let apart = [of(3, 1, 5), of(3, 1, 6), of(3, 1, 6)];
        for own in apart {
            let decide = |drift| commit(own, &apart, drift).unwrap();
            assert_eq!(decide(Drift::Fail), Agreement::Drifted(vec![0, 1, 2]));
            assert_eq!(decide(Drift::Repair), Agreement::Take { root: 1, commits: 3, round: 1 });
        }
        let other = [of(3, 1, 5), of(4, 1, 5)];
        for own in other {
            let error = commit(own, &other, Drift::Ignore).unwrap_err();
            assert!(error.to_string().contains("rank 0 is at 3, and rank 1 at 4"), "{error}");
        }
    }

    #[test]
    fn a_new_group_goes_on_from_the_latest_commit() {
        let take = |root, commits, round| Agreement::Take { root, commits, round };
        for drift in [Drift::Fail, Drift::Repair, Drift::Ignore] {
            assert_eq!(sync(&[], drift), Agreement::Equal);
            assert_eq!(sync(&[of(2, 1, 5), of(2, 1, 5)], drift), Agreement::Equal);
            // A newcomer beside two who have it.
            assert_eq!(sync(&[of(0, 0, 9), of(2, 1, 5), of(2, 1, 5)], drift), take(1, 2, 1));
            // Only the commit of the later round may have returned.
            assert_eq!(sync(&[of(2, 1, 9), of(2, 2, 5)], drift), take(1, 2, 2));
            // Before the first commit states may differ.
            assert_eq!(sync(&[of(0, 0, 9), of(0, 0, 5)], drift), take(0, 0, 0));
        }
        let apart = [of(0, 0, 0), of(2, 1, 9), of(2, 1, 5), of(2, 1, 5)];
        assert_eq!(sync(&apart, Drift::Fail), Agreement::Drifted(vec![1, 2, 3]));
        assert_eq!(sync(&apart, Drift::Repair), take(2, 2, 1));
        assert_eq!(sync(&apart, Drift::Ignore), take(1, 2, 1));
    }

    #[test]
    fn of_thousands_that_have_drifted_apart_few_are_compared_and_most_of_those_have_the_usual_state() {
        let digest = |rank: usize| if rank % 400 == 1 { rank as u64 } else { 0 };
        let reports: Vec<CommitReport> = (0..4000).map(|rank| of(3, 1, digest(rank))).collect();
        let all: Vec<usize> = (0..4000).collect();
        let others = [1, 401, 801, 1201, 1601, 2001, 2401, 2801, 3201];
        let usual = [0, 2, 3, 4, 5, 6, 7, 8, 9, 10];
        let mut expected = [&others[..], &usual].concat();
        expected.sort_unstable();
        assert_eq!(compared(&reports, &all), expected);
        assert_eq!(compared(&reports, &[7, 401, 8]), [7, 8, 401]);
    }

    #[test]
    fn an_error_names_the_parts_and_the_ranks_that_differ() {
        let part = |name: &str, hash| Summary { name: name.to_owned(), length: 1, hash };
        let held = |ranks: &[(usize, u64)]| {
            ranks.iter().map(|(rank, hash)| (*rank, vec![part("w", *hash), part("b", 1)])).collect::<Vec<_>>()
        };
        let said = drifted(held(&[(1, 7), (2, 8), (4, 8)]), 3).to_string();
        assert!(said.contains("at commit 3: \"w\" differs on rank 1") && !said.contains("\"b\""), "{said}");
        let many: Vec<(usize, u64)> =
            (0..40).map(|rank| (rank, if rank < 12 { rank as u64 } else { 99 })).collect();
        let said = drifted(held(&many), 3).to_string();
        assert!(said.contains("differs on ranks 0, 1, 2, 3, 4, 5, 6, 7 and more"), "{said}");
        let orders = vec![(0, vec![part("w", 1), part("b", 1)]), (1, vec![part("b", 1), part("w", 1)])];
        assert!(drifted(orders, 1).to_string().contains("come in different orders"));
    }
}
