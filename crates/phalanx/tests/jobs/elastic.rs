//! Elastic jobs with real processes, which are killed and stopped. This program starts itself as the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use phalanx::elastic::{self, Context, Options, Parts, State};
use phalanx::launch::{Event, Job, Outcome, Report};
use phalanx::sampler::ElasticSampler;
use phalanx::{Error, ProcessGroup, ReduceOp, WorldSize};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{ROLE, run_job};

/// A state to begin with, as hexadecimal digits.
const RESUME: &str = "PHALANX_TEST_RESUME";
const LAST_CALL: &str = "PHALANX_TEST_LAST_CALL_MS";
/// A file that is there when the test has seen what it waits for.
const ENOUGH: &str = "PHALANX_TEST_ENOUGH";
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(60);
const STEPS: u64 = 400;
/// Where workers wait for that: a multiple of the steps between two commits.
const HOLD: u64 = 300;
const FEATURES: usize = 16;

pub const TESTS: &[(&str, fn())] = &[
    ("whoever_is_killed_the_others_go_on_and_lose_no_commit", whoever_is_killed_the_others_go_on),
    ("all_but_one_may_die_at_once", all_but_one_may_die_at_once),
    ("without_a_replacement_the_world_is_smaller", without_a_replacement_the_world_is_smaller),
    ("a_late_replacement_is_taken_in_at_a_commit", a_late_replacement_is_taken_in_at_a_commit),
    ("a_frozen_worker_is_left_behind_and_comes_back", a_frozen_worker_is_left_behind),
    ("an_error_of_its_own_ends_one_worker", an_error_of_its_own_ends_one_worker),
    (
        "an_error_of_its_own_ends_one_worker_of_a_sub_group",
        an_error_of_its_own_ends_one_worker_of_a_sub_group,
    ),
    ("an_abort_an_exit_code_and_a_panic_end_one_worker", an_abort_an_exit_code_and_a_panic_end_one_worker),
    ("a_save_that_failed_is_never_taken_for_a_commit", a_save_that_failed_is_never_taken_for_a_commit),
    ("too_few_workers_end_the_job_with_the_first_failure", too_few_workers_end_the_job),
    ("the_reset_limit_ends_the_job", the_reset_limit_ends_the_job),
    ("one_that_fails_at_once_is_given_up", one_that_fails_at_once_is_given_up),
    ("a_fixed_world_is_refused_in_an_elastic_job", a_fixed_world_is_refused),
];

/// What this program does as a worker.
pub fn play(scenario: &str) {
    crate::harness::abort_after(LIMIT);
    if let Err(error) = work(scenario) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// The step, the weights, and the place in the data; and whether a save fails in the middle.
struct Training((u64, Vec<f32>, ElasticSampler), bool);

impl State for Training {
    fn save(&self, parts: &mut Parts) -> phalanx::Result<()> {
        parts.serialize("state", &self.0)?;
        if self.1 { Err(Error::aborted("the state cannot be written")) } else { Ok(()) }
    }

    fn load(&mut self, parts: &Parts) -> phalanx::Result<()> {
        self.0 = parts.deserialize("state")?;
        Ok(())
    }
}

/// What a worker does.
fn work(scenario: &str) -> phalanx::Result<()> {
    let place = std::env::var("LOCAL_RANK").unwrap();
    match scenario {
        "fixed" => return phalanx::init().map(drop),
        "broken" if place == "1" => return Err(Error::aborted("it never works")),
        _ => {}
    }
    let mut options = Options::from_env()?;
    // The group finds a worker that is killed or stopped; a worker that is only slow is not given up.
    options.keep_alive = (Duration::from_millis(200), Some(25));
    if let Ok(milliseconds) = std::env::var(LAST_CALL) {
        options.last_call = Duration::from_millis(milliseconds.parse().unwrap());
    }
    let mut training = Training((0, vec![0.0; FEATURES], ElasticSampler::new(1000).seed(3)), false);
    if let Ok(state) = std::env::var(RESUME) {
        let bytes: Vec<u8> = state.as_bytes().chunks(2).map(hex).collect();
        training.0 = postcard::from_bytes(&bytes).unwrap();
    }
    let mishap = if place == "1" { scenario } else { "" };
    let steps = elastic::run_with(&options, &mut training, |context: &mut Context<'_, Training>, group| {
        // As Fsdp has groups of its own.
        let part = match scenario {
            "part" => group.new_group(&group.world_size().ranks().collect::<Vec<_>>())?,
            _ => None,
        };
        train(context, (group, part.as_ref().unwrap_or(group)), mishap)
    })?;
    println!("done {steps} {:?}", hash(&training.0.1));
    Ok(())
}

fn hex(digits: &[u8]) -> u8 {
    u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap()
}

fn hash(weights: &[f32]) -> u64 {
    let mix = |hash: u64, weight: &f32| (hash ^ u64::from(weight.to_bits())).wrapping_mul(0x0100_0000_01B3);
    weights.iter().fold(0xCBF2_9CE4_8422_2325, mix)
}

/// Each rank's gradient depends on its samples, so the weights show who took part in which step. Gradients are averaged in `part`.
fn train(
    context: &mut Context<'_, Training>,
    (group, part): (&ProcessGroup, &ProcessGroup),
    mishap: &str,
) -> phalanx::Result<u64> {
    let (rank, world) = (group.rank(), group.world_size());
    let state: String =
        postcard::to_stdvec(&context.state.0).unwrap().iter().map(|byte| format!("{byte:02x}")).collect();
    let (round, step) = (context.round(), context.state.0.0);
    println!("round {round} rank {rank} of {world} step {step} pid {} state {state}", std::process::id());
    while context.state.0.0 < STEPS {
        if context.state.0.0 == HOLD {
            hold(context, group, round)?;
        }
        let (step, weights, sampler) = &mut context.state.0;
        let Some(batch) = sampler.next_batch(4, rank, world) else {
            sampler.next_epoch();
            continue;
        };
        let mut gradients = vec![0.0; FEATURES];
        for index in batch {
            let feature = (index % FEATURES, (index as f32).sin());
            gradients[feature.0] += (weights[feature.0] - feature.1) * feature.1;
        }
        part.all_reduce(&mut gradients, ReduceOp::Avg)?;
        weights.iter_mut().zip(&gradients).for_each(|(weight, gradient)| *weight -= 0.1 * gradient);
        *step += 1;
        std::thread::sleep(Duration::from_millis(2));
        if round == 1 {
            match (mishap, *step) {
                // The others are in a commit, or in the next step.
                ("unlucky", 50) | ("part", 48) => {
                    return Err(Error::invalid_argument("a sample that cannot be read"));
                }
                ("torn", 50) => return Err(torn(context, group)),
                ("aborts", 48) => std::process::abort(),
                ("exits", 48) => std::process::exit(3),
                ("panics", 48) => panic!("a sample that cannot be read"),
                _ => {}
            }
        }
        if step.is_multiple_of(5) || *step == STEPS {
            let step = *step;
            context.commit()?;
            println!("commit {step} round {round}");
        }
    }
    Ok(context.state.0.0)
}

/// Waits until the test has seen enough, however late it is. Commits that change nothing let newcomers in meanwhile.
fn hold(context: &mut Context<'_, Training>, group: &ProcessGroup, round: u64) -> phalanx::Result<()> {
    let Some(enough) = std::env::var_os(ENOUGH) else { return Ok(()) };
    loop {
        let mut is_enough = [i64::from(group.rank().is_main() && Path::new(&enough).exists())];
        group.all_reduce(&mut is_enough, ReduceOp::Max)?;
        if is_enough[0] > 0 {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
        context.commit()?;
        println!("commit {HOLD} round {round}");
    }
}

/// A commit that fails while it saves the state, and a loop that makes nothing of it: it ends with the next failure of another.
fn torn(context: &mut Context<'_, Training>, group: &ProcessGroup) -> Error {
    context.state.1 = true;
    context.commit().unwrap_err();
    println!("torn");
    loop {
        match group.failure() {
            Some(error) => return error,
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// What the workers have said.
#[derive(Debug, Default)]
struct Seen {
    /// By place: the process of each life.
    pids: BTreeMap<u32, Vec<u32>>,
    /// Of each round: the ranks, the world, the step at which it began, and the state.
    rounds: BTreeMap<u64, (BTreeMap<u32, u32>, u32, u64, String)>,
    /// The furthest step that a commit has returned with in each round.
    committed: BTreeMap<u64, u64>,
    done: BTreeSet<String>,
    torn: bool,
    stderr: String,
    lost: Vec<(u32, Option<Duration>)>,
}

impl Seen {
    fn note(&mut self, event: &Event<'_>) {
        match *event {
            Event::Started { rank, pid, .. } => self.pids.entry(rank.get()).or_default().push(pid),
            Event::Lost { failure, replaced_in, .. } => self.lost.push((failure.rank.get(), replaced_in)),
            Event::Line { stream: phalanx::launch::Stream::Stderr, text, .. } => {
                self.stderr += &format!("{}\n", String::from_utf8_lossy(text));
            }
            Event::Line { text, .. } => self.line(std::str::from_utf8(text).unwrap()),
            _ => {}
        }
    }

    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "round" => {
                let (world, step, state) = (number(5) as u32, number(7), words[11].to_owned());
                let fresh = (BTreeMap::new(), world, step, state.clone());
                let round = self.rounds.entry(number(1)).or_insert(fresh);
                // All begin alike, and there is one process for each rank.
                assert_eq!((round.1, round.2, &round.3), (world, step, &state));
                assert_eq!(round.0.insert(number(3) as u32, number(9) as u32), None, "{line}");
            }
            "commit" => {
                let furthest = self.committed.entry(number(3)).or_default();
                *furthest = number(1).max(*furthest);
            }
            "done" => {
                self.done.insert(line.to_owned());
            }
            "torn" => self.torn = true,
            _ => panic!("{line}"),
        }
    }

    fn round(&self) -> u64 {
        self.rounds.keys().copied().max().unwrap_or(0)
    }

    /// The furthest commit of the newest round, if all its ranks have begun.
    fn progress(&self) -> u64 {
        let complete = self.rounds.get(&self.round()).is_some_and(|round| round.0.len() == round.1 as usize);
        if complete { self.committed.get(&self.round()).copied().unwrap_or(0) } else { 0 }
    }

    /// Whether each place has had so many lives, and the last of all are in the newest round.
    fn all_are_in(&self, lives: [usize; 3]) -> bool {
        let newest = self.rounds.last_key_value();
        let newest: BTreeSet<u32> =
            newest.into_iter().flat_map(|(_, round)| round.0.values().copied()).collect();
        let last = self.pids.values().filter_map(|lives| lives.last().copied()).collect();
        self.pids.values().map(Vec::len).eq(lives) && newest == last
    }

    fn worlds(&self) -> Vec<u32> {
        self.rounds.values().map(|round| round.1).collect()
    }

    /// What has to hold whatever happened, and that the end is that of a job without failures that begins where the last
    /// round began.
    fn check(&self) {
        assert_eq!(self.done.len(), 1, "all ranks end alike: {:?}", self.done);
        for (round, (_, _, step, _)) in &self.rounds {
            let before = self.committed.range(..round).map(|(_, step)| *step).max();
            assert!(*step >= before.unwrap_or(0), "round {round} begins at {step}, behind {before:?}");
        }
        let (_, world, _, state) = self.rounds.last_key_value().unwrap().1;
        let (mut other, workers) = (Self::default(), WorldSize::new(*world).unwrap());
        let job = job("train", workers.get()).variable(RESUME, state);
        let report = run_job(&job, LIMIT, |event| other.note(event));
        assert!(matches!(report.outcome, Outcome::Succeeded), "{}", other.stderr);
        assert_eq!(other.done, self.done, "the same steps, without failures, lead elsewhere");
    }
}

fn job(scenario: &str, workers: u32) -> Job {
    Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap())
        .variable(ROLE, format!("elastic::{scenario}"))
        .grace(Duration::from_secs(2))
}

fn elastic(scenario: &str, workers: u32, min: u32, replacements: u32) -> Job {
    job(scenario, workers).min_workers(WorldSize::new(min).unwrap()).max_restarts(replacements)
}

/// Runs the job, and has `act` look at what has been seen after each event, and say whether the workers may go on to the end.
fn watch(job: Job, mut act: impl FnMut(&mut Seen) -> bool) -> (Report, Seen) {
    let (mut seen, folder) = (Seen::default(), tempfile::tempdir().unwrap());
    let enough = folder.path().join("enough");
    let report = run_job(&job.variable(ENOUGH, &enough), LIMIT, |event| {
        seen.note(event);
        if matches!(event, Event::Line { .. }) && act(&mut seen) {
            std::fs::write(&enough, "").unwrap();
        }
    });
    (report, seen)
}

fn send(pid: u32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), signal);
}

fn succeeded(report: &Report, seen: &Seen) {
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {seen:?}", report.outcome);
}

fn whoever_is_killed_the_others_go_on() {
    // At different moments of a step and of a commit: the time between the line and the signal is not in our hand.
    let mut victims = vec![(150, 2), (90, 0), (40, 1)];
    let (report, seen) = watch(elastic("train", 3, 2, 3), |seen| {
        if let Some((step, place)) = victims.last().copied()
            && seen.progress() >= step
        {
            victims.pop();
            send(*seen.pids[&place].last().unwrap(), Signal::KILL);
        }
        seen.all_are_in([2, 2, 2])
    });
    succeeded(&report, &seen);
    assert_eq!((report.replacements, seen.lost.len()), (3, 3), "{:?}", seen.lost);
    // Each place has had one that was killed and one that was not.
    assert!(seen.pids.values().all(|lives| lives.len() == 2), "{:?}", seen.pids);
    // In its round the replacement is behind the survivors, who keep their order.
    for ((_, before), (_, after)) in seen.rounds.iter().zip(seen.rounds.iter().skip(1)) {
        let survivors = before.0.values().filter(|pid| after.0.values().any(|other| other == *pid));
        let survivors: Vec<&u32> = survivors.collect();
        assert!(after.0.values().zip(&survivors).all(|(pid, survivor)| pid == *survivor), "{seen:?}");
    }
    seen.check();
}

fn all_but_one_may_die_at_once() {
    let mut killed = false;
    let (report, seen) = watch(elastic("train", 3, 1, 2), |seen| {
        if !killed && seen.progress() >= 50 {
            killed = true;
            [0, 2].iter().for_each(|place| send(seen.pids[place][0], Signal::KILL));
        }
        seen.all_are_in([2, 1, 2])
    });
    succeeded(&report, &seen);
    assert_eq!(seen.pids[&1].len(), 1);
    seen.check();
}

fn without_a_replacement_the_world_is_smaller() {
    let mut killed = false;
    let (report, seen) = watch(elastic("train", 3, 2, 0), |seen| {
        if !killed && seen.progress() >= 50 {
            killed = true;
            send(seen.pids[&0][0], Signal::KILL);
        }
        seen.worlds() == [3, 2]
    });
    succeeded(&report, &seen);
    assert_eq!((seen.worlds(), seen.lost.as_slice()), (vec![3, 2], &[(0, None)][..]));
    seen.check();
}

fn a_late_replacement_is_taken_in_at_a_commit() {
    let mut killed = false;
    // Nobody is waited for: the survivors go on at once.
    let job = elastic("train", 3, 2, 1).variable(LAST_CALL, "0");
    let (report, seen) = watch(job, |seen| {
        if !killed && seen.progress() >= 50 {
            killed = true;
            send(seen.pids[&2][0], Signal::KILL);
        }
        seen.all_are_in([1, 1, 2])
    });
    succeeded(&report, &seen);
    // If the replacement was as quick as the survivors, it was waited for by nobody all the same.
    assert!([vec![3, 2, 3], vec![3, 3]].contains(&seen.worlds()), "{:?}", seen.worlds());
    if let (Some(before), Some(after)) = (seen.committed.get(&2), seen.rounds.get(&3)) {
        // The commit at which they met it was not undone, though it has not returned.
        assert!(after.2 > *before || after.2 == HOLD, "{seen:?}");
    }
    seen.check();
}

fn a_frozen_worker_is_left_behind() {
    let (mut stopped, mut woken) = (false, false);
    let (report, seen) = watch(elastic("train", 3, 2, 0), |seen| {
        if !stopped && seen.progress() >= 50 {
            stopped = true;
            send(seen.pids[&1][0], Signal::STOP);
        }
        if !woken && seen.worlds().contains(&2) && seen.progress() >= 80 {
            woken = true;
            send(seen.pids[&1][0], Signal::CONT);
        }
        seen.worlds() == [3, 2, 3]
    });
    succeeded(&report, &seen);
    assert_eq!(seen.worlds(), [3, 2, 3], "{}", seen.stderr);
    // The same process, now behind the others.
    assert_eq!(seen.rounds[&3].0[&2], seen.pids[&1][0]);
    assert!(seen.lost.is_empty());
    seen.check();
}

fn an_error_of_its_own_ends_one_worker() {
    says_why(&one_worker_ends("unlucky"));
}

/// Which it leaves before the others learn that it is gone.
fn an_error_of_its_own_ends_one_worker_of_a_sub_group() {
    says_why(&one_worker_ends("part"));
}

fn an_abort_an_exit_code_and_a_panic_end_one_worker() {
    one_worker_ends("aborts");
    one_worker_ends("exits");
    says_why(&one_worker_ends("panics"));
}

fn one_worker_ends(scenario: &str) -> Seen {
    let (report, seen) = watch(elastic(scenario, 3, 2, 1), |seen| seen.all_are_in([1, 2, 1]));
    succeeded(&report, &seen);
    assert_eq!(seen.lost.len(), 1);
    assert!(seen.pids[&1].len() == 2 && seen.pids[&0].len() == 1, "{:?}", seen.pids);
    seen.check();
    seen
}

fn says_why(seen: &Seen) {
    assert!(seen.stderr.contains("a sample that cannot be read"), "{}", seen.stderr);
}

fn a_save_that_failed_is_never_taken_for_a_commit() {
    let mut killed = false;
    let (report, seen) = watch(elastic("torn", 3, 1, 2), |seen| {
        if seen.torn && !killed {
            killed = true;
            send(seen.pids[&2][0], Signal::KILL);
        }
        seen.all_are_in([1, 2, 2])
    });
    succeeded(&report, &seen);
    // The failure of the other has not hidden that this one has no commit to go back to.
    assert!(seen.stderr.contains("the state cannot be written"), "{}", seen.stderr);
    let lives: Vec<usize> = seen.pids.values().map(Vec::len).collect();
    assert_eq!(lives, [1, 2, 2]);
    seen.check();
}

fn too_few_workers_end_the_job() {
    let mut victims = vec![(100, 1), (50, 2)];
    let (report, seen) = watch(elastic("train", 3, 2, 0), |seen| {
        if let Some((step, place)) = victims.last().copied()
            && seen.progress() >= step
        {
            victims.pop();
            send(seen.pids[&place][0], Signal::KILL);
        }
        false
    });
    let Outcome::Failed(failure) = &report.outcome else { panic!("{:?}", report.outcome) };
    assert_eq!((failure.rank.get(), failure.pid), (2, seen.pids[&2][0]));
    assert_eq!(seen.worlds(), [3, 2]);
}

fn the_reset_limit_ends_the_job() {
    let mut victims = vec![(100, 1), (50, 2)];
    let (report, seen) = watch(elastic("train", 3, 1, 2).reset_limit(1), |seen| {
        if let Some((step, place)) = victims.last().copied()
            && seen.progress() >= step
        {
            victims.pop();
            send(*seen.pids[&place].last().unwrap(), Signal::KILL);
        }
        false
    });
    assert!(matches!(report.outcome, Outcome::Failed(_)), "{:?}", report.outcome);
    assert_eq!(seen.worlds().len(), 2);
    assert!(seen.stderr.contains("more often than the reset limit, 1, allows"), "{}", seen.stderr);
}

fn one_that_fails_at_once_is_given_up() {
    let (report, seen) = watch(elastic("broken", 2, 1, 100).variable(LAST_CALL, "0"), |_| true);
    succeeded(&report, &seen);
    let waits: Vec<Option<u64>> = seen.lost.iter().map(|lost| lost.1.map(|wait| wait.as_secs())).collect();
    // The one that works may be done before the last try.
    let expected = [Some(0), Some(1), Some(2), None];
    assert!(
        expected.starts_with(&waits[..waits.len() - 1]) && *waits.last().unwrap() != Some(3),
        "{waits:?}"
    );
    assert!(seen.lost.iter().all(|lost| lost.0 == 1));
}

fn a_fixed_world_is_refused() {
    let (report, seen) = watch(elastic("fixed", 2, 2, 0), |_| true);
    assert!(matches!(report.outcome, Outcome::Failed(_)));
    assert!(
        seen.stderr.contains("this job is elastic") && seen.stderr.contains("elastic::run"),
        "{}",
        seen.stderr
    );
}
