//! All ranks of a job: merges their reports, and compares their clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx::{Error, GroupOptions, ProcessGroup, Rank, Result, rendezvous};

use super::finding::Report;

/// How often two clocks are compared; the fastest answer counts.
const ROUNDS: usize = 8;
/// A message of many packets, in bytes, and how long rank 0 waits for it.
const LARGE: usize = 256 << 10;
const LARGE_TIMEOUT: Duration = Duration::from_secs(10);
/// Clocks that differ by more make the logs of several hosts hard to compare.
const APART: f64 = 0.1;

/// Gives rank 0 one report of all ranks; no wait is longer than `timeout`.
pub(super) fn gather(own: &Report, timeout: Duration) -> Result<Option<Report>> {
    let mut options = GroupOptions::from_env()?;
    options.timeout = timeout;
    let group = ProcessGroup::join(rendezvous::from_env(timeout)?, options)?;
    // Small messages first: if they arrive and the large one does not, packets are lost by their size.
    let offsets = clocks(&group)?;
    exchange_large(&group, timeout).map_err(|error| too_large(&error))?;
    let reports = group.gather_object(own, Rank::MAIN)?;
    group.barrier()?;
    let Some(reports) = reports else { return Ok(None) };
    let mut report = own.clone();
    report.good("group", format!("{} ranks have met", reports.len()));
    clock_line(&mut report, &offsets, &reports);
    let mut told = vec![report.host_id.clone()];
    for other in &reports {
        if !told.contains(&other.host_id) {
            told.push(other.host_id.clone());
            report.compare(other);
        }
    }
    Ok(Some(report))
}

/// Rank 0 sends a large message to each other rank, and gets it back.
fn exchange_large(group: &ProcessGroup, timeout: Duration) -> Result<()> {
    let mut message = vec![0u8; LARGE];
    if !group.rank().is_main() {
        group.recv(&mut message, Rank::MAIN)?;
        return group.send(&message, Rank::MAIN);
    }
    let group = group.with_timeout(timeout.min(LARGE_TIMEOUT));
    group.world_size().ranks().skip(1).try_for_each(|peer| {
        group.send(&message, peer)?;
        group.recv(&mut message, peer)
    })
}

/// The error of a large message that has not arrived, after small ones have.
fn too_large(error: &Error) -> Error {
    Error::aborted(format!("small messages between the ranks arrive, and one of {LARGE} B does not: {error}")).with_remedy(
        "packets may be lost by their size: compare the MTU of the hosts' interfaces (`ip link`), try `ping -M do -s 1472 HOST`, and let \
         ICMP through the firewalls",
    )
}

/// On rank 0: how many seconds each other rank's clock is ahead, and the time of the answer, which limits the error.
fn clocks(group: &ProcessGroup) -> Result<Vec<(f64, Duration)>> {
    if !group.rank().is_main() {
        for _ in 0..ROUNDS {
            group.recv(&mut [0f64], Rank::MAIN)?;
            group.send(&[now()?], Rank::MAIN)?;
        }
        return Ok(Vec::new());
    }
    let others = group.world_size().ranks().skip(1);
    others.map(|peer| (0..ROUNDS).map(|_| compare(group, peer)).try_fold(WORST, fastest)).collect()
}

const WORST: (f64, Duration) = (0.0, Duration::MAX);

fn fastest(best: (f64, Duration), next: Result<(f64, Duration)>) -> Result<(f64, Duration)> {
    next.map(|next| if next.1 < best.1 { next } else { best })
}

/// Asks `peer` once; its clock is taken to be read halfway between question and answer.
fn compare(group: &ProcessGroup, peer: Rank) -> Result<(f64, Duration)> {
    let (start, mut theirs) = (Instant::now(), [0f64]);
    group.send(&[0f64], peer)?;
    group.recv(&mut theirs, peer)?;
    let taken = start.elapsed();
    Ok((theirs[0] - (now()? - taken.as_secs_f64() / 2.0), taken))
}

fn now() -> Result<f64> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map(|time| time.as_secs_f64()).map_err(|_| Error::aborted("this host's clock is before 1970"))
}

/// One line about the clock that differs most from rank 0's.
fn clock_line(report: &mut Report, offsets: &[(f64, Duration)], reports: &[Report]) {
    let furthest = offsets
        .iter()
        .zip(reports.iter().skip(1))
        .max_by(|left, right| left.0.0.abs().total_cmp(&right.0.0.abs()));
    let Some(((offset, taken), other)) = furthest else { return };
    let text = format!(
        "at most {:.1} ms apart ({}; asked in {} µs)",
        offset.abs() * 1e3,
        other.host,
        taken.as_micros()
    );
    match offset.abs() > APART {
        true => report.advise("clocks", text, "times in logs do not match: run chrony or ntpd on every host"),
        false => report.good("clocks", text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_message_that_is_lost_is_a_defect_with_a_remedy() {
        let error = too_large(&Error::aborted("rank 1 (b) has not received it in time")).to_string();
        assert!(
            error.contains("262144 B does not: rank 1 (b) has not received it") && error.contains("MTU"),
            "{error}"
        );
    }

    #[test]
    fn the_clock_that_is_furthest_is_named() {
        let reports = ["a", "b", "c"].map(|host| Report::new(host.to_owned()));
        let mut report = reports[0].clone();
        let time = Duration::from_micros(80);
        clock_line(&mut report, &[(-0.5, time), (0.001, time)], &reports);
        assert!(report.findings[0].text.starts_with("at most 500.0 ms apart (b;"), "{report:?}");
        assert!(report.findings[0].remedy.is_some() && report.is_good());
    }
}
