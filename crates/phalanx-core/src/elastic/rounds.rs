//! The sequence of groups of an elastic job.

use std::time::Duration;

use super::members::{ElasticEnd, WorkerId};
use super::options::{ElasticEnv, Options};
use super::retry::{Decision, NUMBERS, Plan, Position, decide};
use super::session::{NextRound, Round, Session};
use super::worlds::Worlds;
use crate::caller::Caller;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::group::{GroupOptions, ProcessGroup};
use crate::rank::Rank;
use crate::rendezvous::Rendezvous;
use crate::world_size::WorldSize;

/// How long the failure of a sub-group may take to reach its group.
const PROPAGATION_TIMEOUT: Duration = Duration::from_millis(200);

/// How long a rank that has left a sub-group, or ended it, may take to leave its group, too: it first looks by itself whether another one has
/// failed.
const LEAVING_TIMEOUT: Duration = Duration::from_secs(10);

/// How much more time a group has to connect for each of its workers: three connections at the end of a network with a round trip of 200 ms that
/// loses packets, of which a rank makes 32 at a time.
const WORKER_TIMEOUT: Duration = Duration::from_millis(100);

/// How the job goes on.
pub(super) enum Next {
    /// In a new group, from the last commit.
    FromCommit,
    /// In a new group, with the step that was cut off.
    Resume(Plan),
    Over(ElasticEnd),
}

pub(super) struct Rounds {
    session: Session,
    options: Options,
    reset_limit: Option<u32>,
    current: Option<Current>,
    /// The last round that this worker has left.
    left: u64,
    worlds: Worlds,
    /// Why there will be no other round.
    lost: Option<Error>,
}

/// The round whose group is connected.
struct Current {
    number: u64,
    group: ProcessGroup,
    members: Vec<WorkerId>,
}

impl Rounds {
    pub(super) fn start(env: &ElasticEnv, options: &Options) -> Result<Self> {
        let session = Session::start(env, options)?;
        let reset_limit = env.settings.reset_limit;
        let (options, worlds) = (options.clone(), Worlds::default());
        Ok(Self { session, options, reset_limit, current: None, left: 0, worlds, lost: None })
    }

    /// Joins the next round, and repeats that until a group is connected. `position`: where this rank was cut off in a
    /// step that it can replay.
    pub(super) fn next(&mut self, position: Option<Position>) -> Result<Next> {
        match &self.lost {
            Some(error) => Err(error.clone()),
            None => self.find(position).inspect_err(|error| self.lost = Some(error.clone())),
        }
    }

    fn find(&mut self, mut position: Option<Position>) -> Result<Next> {
        loop {
            let round = match self.session.wait_for_round(self.left, position.is_some())? {
                NextRound::Round(round) => round,
                NextRound::Over(job_end) => return Ok(Next::Over(job_end)),
            };
            let Round { number, rendezvous, members, rejoined } = *round;
            self.left = number;
            if rejoined {
                // A worker that was declared dead has a new number, and no step to replay.
                position = None;
            }
            let rank = rendezvous.rank;
            let world = rendezvous.world_size.get();
            tracing::debug!(round = number, rank = rank.get(), world, "a new group");
            let group = match connect(rendezvous, &self.options) {
                Ok(group) => group,
                Err(cause) if cause.is_a_peers(rank) => {
                    tracing::warn!(round = number, %cause, "the new group could not be connected; all workers form another");
                    self.session.leave(&members, Some(&cause))?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            self.session.enter(number, &group);
            self.current = Some(Current { number, group: group.clone(), members: members.clone() });
            match exchange(&group, position) {
                Ok(positions) => {
                    let decision = decide(&positions);
                    self.worlds.decided(number, members, decision, position);
                    return Ok(match decision {
                        Decision::GoBack => Next::FromCommit,
                        Decision::GoOn(plan) => Next::Resume(plan),
                    });
                }
                Err(error) => match failure_of(&group).filter(|cause| cause.is_a_peers(rank)) {
                    Some(cause) => {
                        tracing::warn!(round = number, %cause, "the new group has failed; all workers form another");
                        self.worlds.failed(number, members);
                        self.leave(Some(&cause))?;
                    }
                    None => return Err(error),
                },
            }
        }
    }

    /// The number and the group of the current round, if its group is connected.
    pub(super) fn current(&self) -> Option<(u64, ProcessGroup)> {
        self.current.as_ref().map(|current| (current.number, current.group.clone()))
    }

    /// Whether a worker waits for a new group.
    pub(super) fn workers_wait(&self) -> bool {
        self.session.workers_wait()
    }

    pub(super) fn reset_limit(&self) -> Option<u32> {
        self.reset_limit
    }

    /// This worker has left its round; `cause` is the failure, if there was one.
    pub(super) fn leave(&mut self, cause: Option<&Error>) -> Result<()> {
        match self.current.take() {
            Some(current) => self.session.leave(&current.members, cause),
            None => Ok(()),
        }
    }

    /// All members have finished.
    pub(super) fn done(self) {
        self.session.done(self.left);
    }

    /// The job is over, and no entry needs to be appended.
    pub(super) fn over(self) {
        self.session.over();
    }

    /// This worker's rank in the world of `round`.
    pub(super) fn rank_in(&self, round: u64) -> Result<(Rank, WorldSize)> {
        self.worlds.rank_in(round, self.session.id())
    }

    /// The ranks of the world of `round` that are not members of `group`, a later round.
    pub(super) fn missing(&self, round: u64, group: u64) -> Result<Vec<Rank>> {
        self.worlds.missing(round, group)
    }
}

fn connect(rendezvous: Rendezvous, options: &Options) -> Result<ProcessGroup> {
    let timeout = options.group.timeout;
    let connecting = timeout.min(connect_timeout(options, rendezvous.world_size));
    let connecting = GroupOptions { timeout: connecting, ..options.group.clone() };
    Ok(ProcessGroup::join(rendezvous, connecting)?.with_timeout(timeout))
}

/// How long the ranks of a world may take to connect. Each makes its connections so many at a time, and each of these takes round trips.
fn connect_timeout(options: &Options, world: WorldSize) -> Duration {
    options.connect_timeout.saturating_add(WORKER_TIMEOUT.saturating_mul(world.get()))
}

/// Exchanges where each rank of the new group was cut off: the first collective of every round, of 48 bytes a rank.
fn exchange(group: &ProcessGroup, position: Option<Position>) -> Result<Vec<Option<Position>>> {
    let mut received = vec![0_i64; NUMBERS * group.world_size().count()];
    group.in_call(Caller::ElasticRun).all_gather(&Position::encode(position), &mut received)?;
    Ok(received.as_chunks::<NUMBERS>().0.iter().map(|numbers| Position::decode(*numbers)).collect())
}

/// Why the group has failed, if it has. If a sub-group alone has lost a rank, that ends the group too: the connections of a sub-group may
/// break while all ranks live, and each group finds by itself that a rank is frozen. If another rank has left a sub-group, or ended it, the
/// group fails only if that rank is gone from it as well.
pub(super) fn failure_of(group: &ProcessGroup) -> Option<Error> {
    failure_within(group, LEAVING_TIMEOUT)
}

fn failure_within(group: &ProcessGroup, leaving: Duration) -> Option<Error> {
    await_failure(group, PROPAGATION_TIMEOUT).or_else(|| {
        let rank = group.rank();
        let is_loss = |cause: &Error| cause.is_peer_failure() || cause.is_timeout();
        let is_another_s = |cause: &Error| cause.is_a_peers(rank) && cause.culprit(rank).is_some();
        match group.failure_in_family(is_loss) {
            Some(loss) => Some(group.fail_unless_explained(loss)),
            None => group.failure_in_family(is_another_s).and_then(|_| await_failure(group, leaving)),
        }
    })
}

fn await_failure(group: &ProcessGroup, timeout: Duration) -> Option<Error> {
    let deadline = Deadline::after(timeout);
    while group.failure().is_none() && !deadline.has_passed() {
        std::thread::sleep(Duration::from_millis(1));
    }
    group.failure()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn a_thousand_workers_have_the_time_to_connect_over_a_slow_network() {
        let options = Options::default();
        let [few, many] =
            [8, 1000].map(|workers| connect_timeout(&options, WorldSize::new(workers).unwrap()));
        assert_eq!((few.as_secs(), many.as_secs()), (60, 160));
    }

    #[test]
    fn a_sub_group_that_has_lost_a_rank_ends_the_group_and_any_other_error_does_not() {
        let groups = ProcessGroup::in_process(WorldSize::new(3).unwrap()).unwrap();
        let all_are_here = Barrier::new(groups.len());
        std::thread::scope(|scope| {
            for group in groups {
                let all_are_here = &all_are_here;
                scope.spawn(move || {
                    let members = [Rank::new(1), Rank::new(2)];
                    let [own, lost] = [(); 2].map(|()| group.new_group(&members).unwrap());
                    all_are_here.wait();
                    match (group.rank().get(), own, lost) {
                        (2, Some(own), Some(lost)) => {
                            own.abort(Error::aborted("a fault of the program"));
                            all_are_here.wait();
                            lost.abort(Error::timeout("a part did not come in time"));
                        }
                        (1, Some(own), Some(lost)) => {
                            own.barrier().unwrap_err();
                            let cause = failure_within(&group, Duration::ZERO);
                            assert!(cause.is_none(), "the program may know what to do: {cause:?}");
                            all_are_here.wait();
                            lost.barrier().unwrap_err();
                            // As those of a loop that has returned.
                            drop((own, lost));
                            let cause = failure_of(&group).unwrap();
                            // It is rank 1 in the sub-group.
                            assert_eq!(
                                (cause.is_timeout(), cause.rank()),
                                (true, Some(Rank::new(2))),
                                "{cause}"
                            );
                            assert!(cause.is_a_peers(group.rank()));
                        }
                        _ => {
                            all_are_here.wait();
                        }
                    }
                    let error = group.barrier().unwrap_err();
                    assert!(error.to_string().contains("a part did not come in time"), "{error}");
                });
            }
        });
    }

    #[test]
    fn a_rank_that_ends_with_an_error_leaves_its_sub_group_before_the_group() {
        let groups = ProcessGroup::in_process(WorldSize::new(2).unwrap()).unwrap();
        std::thread::scope(|scope| {
            for group in groups {
                scope.spawn(move || {
                    let part = group.new_group(&[Rank::MAIN, Rank::new(1)]).unwrap().unwrap();
                    if group.rank().is_main() {
                        assert!(part.barrier().unwrap_err().is_peer_left());
                        let cause = failure_of(&group).unwrap();
                        assert!(cause.is_a_peers(group.rank()), "{cause}");
                        return;
                    }
                    drop(part);
                    // It looks why it has failed itself, and here for twice as long.
                    assert!(failure_of(&group).is_none() && failure_of(&group).is_none());
                    group.abort(Error::aborted("a sample cannot be read"));
                });
            }
        });
    }
}
