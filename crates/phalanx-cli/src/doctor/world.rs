//! All ranks of a job: merges their reports, and compares their clocks.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use phalanx::{Buffer, DType, Error, GroupOptions, P2pOp, ProcessGroup, Rank, Result, rendezvous};

use super::finding::Report;

/// How often two clocks are compared; the fastest answer counts.
const ROUNDS: usize = 8;
/// A message that is larger than any packet, in bytes, and how long rank 0 waits for it: on a slow network that loses packets it takes
/// seconds.
const LARGE: usize = 64 << 10;
const LARGE_TIMEOUT: Duration = Duration::from_secs(30);
/// So many ranks are asked at the same time. On a slow network one after the other would take minutes.
const AT_ONCE: usize = 64;
/// Clocks that differ by more make the logs of several hosts hard to compare.
const APART: f64 = 0.1;

/// Gives rank 0 one report of all ranks. It waits for none of them longer than `timeout`; the others wait for it while it asks all.
pub(super) fn gather(own: &Report, timeout: Duration) -> Result<Option<Report>> {
    let mut options = GroupOptions::from_env()?;
    options.timeout = timeout;
    let group = ProcessGroup::join(rendezvous::from_env(timeout)?, options)?;
    let world_size = group.world_size();
    let patient = group.with_timeout(timeout.saturating_mul(world_size.get()));
    let mut offsets = Vec::new();
    if group.rank().is_main() {
        let others: Vec<Rank> = world_size.ranks().skip(1).collect();
        // Small messages first: if they arrive and the large one does not, packets are lost by their size.
        for peers in others.chunks(AT_ONCE) {
            offsets.extend(compare_clocks(&group, peers)?);
        }
        let group = group.with_timeout(timeout.min(LARGE_TIMEOUT));
        let exchanged = others.chunks(AT_ONCE).try_for_each(|peers| exchange_large(&group, peers));
        exchanged.map_err(|error| if error.is_timeout() { too_large(&error) } else { error })?;
    } else {
        (0..ROUNDS).try_for_each(|_| tell_time(&patient))?;
        return_large(&patient)?;
    }
    let reports = patient.gather_object(own, Rank::MAIN)?;
    patient.barrier()?;
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

/// Rank 0 sends a large message to each of these ranks, and gets it back.
fn exchange_large(group: &ProcessGroup, peers: &[Rank]) -> Result<()> {
    let message = || Buffer::zeroed(DType::U8, LARGE);
    let sent = peers.iter().map(|peer| P2pOp::send(message(), *peer));
    let received = peers.iter().map(|peer| P2pOp::recv(message(), *peer));
    let works = group.batch_isend_irecv(sent.chain(received).collect())?;
    works.into_iter().try_for_each(|work| work.wait().map(drop))
}

/// What another rank does meanwhile.
fn return_large(group: &ProcessGroup) -> Result<()> {
    let mut message = vec![0u8; LARGE];
    group.recv(&mut message, Rank::MAIN)?;
    group.send(&message, Rank::MAIN)
}

/// The error of a large message that has not arrived, after small ones have.
fn too_large(error: &Error) -> Error {
    let error = error.clone().without_remedy();
    Error::aborted(format!("small messages between the ranks arrive, and one of {LARGE} B does not: {error}")).with_remedy(
        "packets may be lost by their size: compare the MTU of the hosts' interfaces (`ip link`), try `ping -M do -s 1472 HOST`, and let \
         ICMP through the firewalls",
    )
}

/// On rank 0: how many seconds the clock of each of these ranks is ahead, and the time of the answer, which limits the error.
fn compare_clocks(group: &ProcessGroup, peers: &[Rank]) -> Result<Vec<(f64, Duration)>> {
    let mut fastest = vec![(0.0, Duration::MAX); peers.len()];
    for _ in 0..ROUNDS {
        let asked = peers.iter().map(|peer| {
            let start = Instant::now();
            group.send(&[0f64], *peer).map(|()| start)
        });
        let asked = asked.collect::<Result<Vec<_>>>()?;
        for ((peer, start), fastest) in peers.iter().zip(asked).zip(&mut fastest) {
            let mut theirs = [0f64];
            group.recv(&mut theirs, *peer)?;
            let taken = start.elapsed();
            if taken < fastest.1 {
                // The other clock is taken to be read halfway between question and answer.
                *fastest = (theirs[0] - (now()? - taken.as_secs_f64() / 2.0), taken);
            }
        }
    }
    Ok(fastest)
}

/// What another rank does meanwhile, in each round.
fn tell_time(group: &ProcessGroup) -> Result<()> {
    group.recv(&mut [0f64], Rank::MAIN)?;
    group.send(&[now()?], Rank::MAIN)
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
    use std::sync::mpsc::channel;
    use std::thread::scope;

    use phalanx::WorldSize;

    use super::*;

    /// Rank 1 answers when rank 2 was asked.
    #[test]
    fn ranks_are_asked_at_the_same_time() {
        let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
        let groups: Vec<_> = groups.iter().map(|group| group.with_timeout(Duration::from_secs(60))).collect();
        let ((asked, was_asked), (sent, was_sent)) = (channel(), channel());
        scope(|scope| {
            let (main, first, second) = (&groups[0], &groups[1], &groups[2]);
            scope.spawn(move || {
                was_asked.recv().unwrap();
                (0..ROUNDS).try_for_each(|_| tell_time(first)).unwrap();
                was_sent.recv().unwrap();
                return_large(first).unwrap();
            });
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    second.recv(&mut [0f64], Rank::MAIN).unwrap();
                    let _ = asked.send(());
                    second.send(&[now().unwrap()], Rank::MAIN).unwrap();
                }
                let mut message = vec![0u8; LARGE];
                second.recv(&mut message, Rank::MAIN).unwrap();
                sent.send(()).unwrap();
                second.send(&message, Rank::MAIN).unwrap();
            });
            let peers = [Rank::new(1), Rank::new(2)];
            let offsets = compare_clocks(main, &peers).unwrap();
            assert!(offsets.len() == 2 && offsets.iter().all(|(_, taken)| *taken < Duration::MAX));
            exchange_large(main, &peers).unwrap();
        });
    }

    #[test]
    fn a_large_message_that_is_lost_is_a_defect_with_a_remedy() {
        let late = Error::aborted("rank 1 (b) has not received it in time").with_remedy("wait longer");
        let error = too_large(&late).to_string();
        assert!(
            error.contains("65536 B does not: rank 1 (b) has not received it in time (packets")
                && error.contains("MTU"),
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
