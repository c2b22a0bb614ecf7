//! Steps that a death cuts off, with real processes: the survivors do them again, and come to what a computation on paper
//! comes to in which the dead rank's part is missing. This program starts itself as the workers.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use phalanx::elastic::{self, Context, Options, Parts, State};
use phalanx::launch::{Event, Job, Outcome, Stream};
use phalanx::sampler::ElasticSampler;
use phalanx::{ProcessGroup, Rank, ReduceOp, Result, WorldSize};
use rustix::process::{Signal, getpid, kill_process};

use crate::harness::{ROLE, run_job};

/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(60);
const STEPS: u64 = 60;
const SAMPLES: usize = 300;
const FEATURES: usize = 16;
const COMMIT_EVERY: u64 = 7;
/// Where workers that are told so wait for a replacement: a multiple of that.
const HOLD: u64 = 56;

pub const TESTS: &[(&str, fn())] = &[
    ("a_step_that_any_death_cuts_off_is_not_lost", a_step_that_any_death_cuts_off_is_not_lost),
    ("the_last_one_goes_on_alone", the_last_one_goes_on_alone),
    ("two_may_die_in_one_step_and_again_while_it_is_repeated", two_may_die_in_one_step),
    ("a_replacement_is_taken_in_at_the_next_commit", a_replacement_is_taken_in_at_the_next_commit),
    ("with_too_few_survivors_all_go_back", with_too_few_survivors_all_go_back),
    ("another_collective_that_is_cut_off_leads_back", another_collective_that_is_cut_off_leads_back),
    ("a_reduction_whose_beginning_is_lost_leads_back", a_reduction_whose_beginning_is_lost_leads_back),
];

/// What this program does as a worker. `deaths` says which worker dies where, as `place:step:point` with commas between; each once.
pub fn play(deaths: &str) {
    crate::harness::abort_after(LIMIT);
    if let Err(error) = work(deaths) {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

/// The step, the weights, and the place in the data. All is whole numbers, so that sums are the same in any order.
/// It is bound to its group, which a commit uses.
struct Training((u64, Vec<i64>, ElasticSampler), Option<ProcessGroup>);

impl State for Training {
    fn save(&self, parts: &mut Parts) -> Result<()> {
        parts.serialize("state", &self.0)
    }

    fn load(&mut self, parts: &Parts) -> Result<()> {
        self.0 = parts.deserialize("state")?;
        Ok(())
    }

    fn enter(&mut self, group: &ProcessGroup) -> Result<()> {
        assert!(self.1.is_none(), "it has not left the last one");
        self.1 = Some(group.clone());
        group.barrier()
    }

    fn leave(&mut self) {
        self.1 = None;
    }

    fn agree(&mut self) -> Result<()> {
        self.1.as_ref().unwrap().barrier()
    }
}

fn training() -> Training {
    Training((0, vec![1; FEATURES], ElasticSampler::new(SAMPLES).seed(3)), None)
}

fn gradient(weights: &[i64], batch: &[usize]) -> Vec<i64> {
    let mut gradients = vec![0_i64; FEATURES];
    for index in batch {
        let (feature, number) = (index % FEATURES, *index as i64 + 1);
        gradients[feature] =
            gradients[feature].wrapping_add(weights[feature].wrapping_mul(number) >> 7).wrapping_add(number);
    }
    gradients
}

/// The order of steps and whose part is in each show in the result.
fn update(weights: &mut [i64], sums: &[i64], count: i64) {
    for (weight, sum) in weights.iter_mut().zip(sums) {
        *weight = weight.wrapping_mul(31).wrapping_add(sum.wrapping_mul(1000) / count.max(1));
    }
}

fn hash(weights: &[i64]) -> u64 {
    let mix = |hash: u64, weight: &i64| (hash ^ weight.cast_unsigned()).wrapping_mul(0x0100_0000_01B3);
    weights.iter().fold(0xCBF2_9CE4_8422_2325, mix)
}

fn work(deaths: &str) -> Result<()> {
    let mut options = Options::from_env()?;
    // The group finds a worker that is killed or stopped; a worker that is only slow is not given up.
    options.keep_alive = (Duration::from_millis(200), Some(25));
    let mut training = training();
    elastic::run_with(&options, &mut training, |context: &mut Context<'_, Training>, group| {
        train(context, group, deaths)
    })?;
    println!("done {} {}", training.0.0, hash(&training.0.1));
    Ok(())
}

fn train(context: &mut Context<'_, Training>, group: &ProcessGroup, deaths: &str) -> Result<()> {
    let place = std::env::var("LOCAL_RANK").unwrap();
    let origin = context.round();
    let die_at = |step: u64, point: &str| {
        // Nobody in the place of a dead one, nor after all have gone back.
        if origin == 1 && deaths.split(',').any(|death| death == format!("{place}:{step}:{point}")) {
            let _ = kill_process(getpid(), Signal::KILL);
        }
    };
    println!("begin {} {} {origin} {}", std::process::id(), context.state.0.0, group.world_size());
    let mut sums = vec![0; FEATURES];
    while context.state.0.0 < STEPS {
        // However late the replacement is: commits that change nothing let it in.
        while deaths.contains("waits") && context.state.0.0 == HOLD && context.world_size().get() < 3 {
            std::thread::sleep(Duration::from_millis(2));
            context.commit()?;
        }
        let (rank, world) = (context.rank(), context.world_size());
        let (step, weights, sampler) = &mut context.state.0;
        let Some(batch) = sampler.next_batch(2, rank, world) else {
            sampler.next_epoch();
            continue;
        };
        let step = *step;
        let gradients = gradient(weights, &batch);
        if deaths.contains("elsewhere") {
            die_at(step, "elsewhere");
            context.group().barrier()?;
        }
        let mut next = "";
        let reduced = context.step(|_, group| {
            let again = std::mem::replace(&mut next, "-again");
            die_at(step, &format!("before{again}"));
            sums.copy_from_slice(&gradients);
            let summed = group.all_reduce(&mut sums, ReduceOp::Sum);
            if deaths.contains("lost") {
                summed.inspect_err(|error| group.abort(error.clone()))?;
            } else {
                summed?;
            }
            die_at(step, &format!("within{again}"));
            let mut count = [batch.len() as i64];
            group.all_reduce(&mut count, ReduceOp::Sum)?;
            die_at(step, &format!("behind{again}"));
            Ok(count[0])
        })?;
        die_at(step, "through");
        let missing: Vec<String> = reduced.missing.iter().map(ToString::to_string).collect();
        let (missing, changed) = (format!("[{}]", missing.join(",")), reduced.changed);
        println!("step {step} {} {origin} {world} {missing} {changed} {}", std::process::id(), reduced.value);
        let (step, weights, sampler) = &mut context.state.0;
        sampler.put_back(&reduced.missing);
        update(weights, &sums, reduced.value);
        *step += 1;
        std::thread::sleep(Duration::from_millis(1));
        if step.is_multiple_of(COMMIT_EVERY) || *step == STEPS {
            context.commit()?;
        }
    }
    Ok(())
}

/// How a step has ended, as the ranks say.
#[derive(Clone, Debug, PartialEq)]
struct Reduced {
    world: u32,
    missing: Vec<u32>,
    changed: bool,
    count: usize,
}

#[derive(Debug, Default)]
struct Seen {
    /// Of each call of a loop: process, step, round and world.
    begun: Vec<(u32, u64, u64, u32)>,
    /// By the round in which the loop was called, and the step; the later replaces what was lost.
    steps: BTreeMap<(u64, u64), Reduced>,
    /// The steps of each process, in order.
    of: BTreeMap<u32, Vec<u64>>,
    done: BTreeSet<String>,
    stderr: String,
}

impl Seen {
    fn line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "begin" => self.begun.push((number(1) as u32, number(2), number(3), number(4) as u32)),
            "step" => {
                let missing = words[5].trim_matches(['[', ']']).split(',').filter(|rank| !rank.is_empty());
                let reduced = Reduced {
                    world: number(4) as u32,
                    missing: missing.map(|rank| rank.parse().unwrap()).collect(),
                    changed: words[6] == "true",
                    count: number(7) as usize,
                };
                self.of.entry(number(2) as u32).or_default().push(number(1));
                let first = self.steps.entry((number(3), number(1))).or_insert_with(|| reduced.clone());
                assert_eq!(*first, reduced, "the ranks differ: {line}");
            }
            "done" => {
                self.done.insert(line.to_owned());
            }
            _ => panic!("{line}"),
        }
    }

    /// What counts of each step: of several times that it was done, the last.
    fn last(&self) -> Vec<&Reduced> {
        let last = |step| self.steps.iter().rev().find(|((_, other), _)| *other == step).unwrap().1;
        (0..STEPS).map(last).collect()
    }

    /// All have come to what a computation comes to in which each step counts the parts that the ranks say, and no other.
    fn check(&self) {
        let Training((_, mut weights, mut sampler), _) = training();
        let mut seen = vec![0; SAMPLES];
        for reduced in self.last() {
            let world = WorldSize::new(reduced.world).unwrap();
            let mut batches = next_batches(&mut sampler, world);
            if batches.is_none() {
                assert!(seen.iter().all(|times| *times == 1), "an epoch has lost a sample, or had one twice");
                seen.fill(0);
                sampler.next_epoch();
                batches = next_batches(&mut sampler, world);
            }
            let mut sums = vec![0_i64; FEATURES];
            let mut count = 0;
            for (rank, batch) in (0..).zip(batches.unwrap()) {
                if !reduced.missing.contains(&rank) {
                    batch.iter().for_each(|index| seen[*index] += 1);
                    count += batch.len();
                    let gradients = gradient(&weights, &batch);
                    sums.iter_mut()
                        .zip(gradients)
                        .for_each(|(sum, gradient)| *sum = sum.wrapping_add(gradient));
                }
            }
            assert_eq!(count, reduced.count);
            let missing: Vec<Rank> = reduced.missing.iter().copied().map(Rank::new).collect();
            sampler.put_back(&missing);
            update(&mut weights, &sums, count as i64);
        }
        let done = format!("done {STEPS} {}", hash(&weights));
        assert_eq!(self.done, BTreeSet::from([done]), "{self:?}");
    }

    /// No process has done a step twice, or left one out.
    fn nothing_was_lost(&self) {
        for steps in self.of.values() {
            assert!(steps.windows(2).all(|pair| pair[1] == pair[0] + 1), "{steps:?} {}", self.stderr);
        }
    }

    /// The worlds that data were distributed to, in turn.
    fn worlds(&self) -> Vec<u32> {
        let mut worlds: Vec<u32> = self.last().iter().map(|reduced| reduced.world).collect();
        worlds.dedup();
        worlds
    }

    /// The steps in which somebody's part is missing.
    fn thinned(&self) -> Vec<u64> {
        (0..)
            .zip(self.last())
            .filter(|(_, reduced)| !reduced.missing.is_empty())
            .map(|(step, _)| step)
            .collect()
    }
}

fn next_batches(sampler: &mut ElasticSampler, world: WorldSize) -> Option<Vec<Vec<usize>>> {
    let mut copies = vec![sampler.clone(); world.count()];
    let batches = world.ranks().zip(&mut copies).map(|(rank, copy)| copy.next_batch(2, rank, world));
    let batches = batches.collect();
    *sampler = copies.swap_remove(0);
    batches
}

/// Runs `workers` of whom those die that `deaths` says.
fn run(workers: u32, min: u32, replacements: u32, deaths: &str) -> Seen {
    let mut seen = Seen::default();
    let job = Job::new(std::env::current_exe().unwrap(), WorldSize::new(workers).unwrap())
        .variable(ROLE, format!("retry::{deaths}"))
        .grace(Duration::from_secs(2))
        .min_workers(WorldSize::new(min).unwrap())
        .max_restarts(replacements);
    let report = run_job(&job, LIMIT, |event| match event {
        Event::Line { stream: Stream::Stderr, text, .. } => {
            seen.stderr += &format!("{}\n", String::from_utf8_lossy(text));
        }
        Event::Line { text, .. } => seen.line(std::str::from_utf8(text).unwrap()),
        _ => {}
    });
    let outcome = report.outcome;
    assert!(matches!(outcome, Outcome::Succeeded), "{outcome:?} {seen:?}");
    seen
}

fn a_step_that_any_death_cuts_off_is_not_lost() {
    for point in ["before", "within", "behind", "through"] {
        let seen = run(4, 2, 0, &format!("1:22:{point},0:38:{point}"));
        seen.check();
        seen.nothing_was_lost();
        // The loop is called once.
        assert!(
            seen.begun.iter().all(|begun| begun.1 == 0) && seen.begun.len() == 4,
            "{point} {:?}",
            seen.begun
        );
        assert_eq!(seen.worlds(), [4, 3, 2], "{point}");
        let thinned = seen.thinned();
        match point {
            // Their gradients never left them.
            "before" => assert_eq!(thinned, [22, 38]),
            // Theirs may have been there, or are missing in the next step.
            _ => assert!(thinned.iter().all(|step| [22, 23, 38, 39].contains(step)), "{point} {thinned:?}"),
        }
    }
}

fn the_last_one_goes_on_alone() {
    let seen = run(2, 1, 0, "0:33:within");
    seen.check();
    seen.nothing_was_lost();
    assert_eq!((seen.worlds(), seen.begun.len()), (vec![2, 1], 2));
}

fn two_may_die_in_one_step() {
    let seen = run(4, 1, 0, "0:22:before,3:22:before,2:22:within-again");
    seen.check();
    seen.nothing_was_lost();
    assert_eq!((seen.worlds().last(), seen.begun.len()), (Some(&1), 4));
}

fn a_replacement_is_taken_in_at_the_next_commit() {
    let seen = run(3, 2, 1, "waits,1:22:within");
    seen.check();
    seen.nothing_was_lost();
    assert_eq!(seen.worlds(), [3, 2, 3]);
    // The others have not waited for it, and are called anew at a commit.
    let begun: Vec<u64> = seen.begun.iter().map(|begun| begun.1).collect();
    assert!(begun.len() == 6 && begun[3] > 22 && begun[3].is_multiple_of(COMMIT_EVERY), "{begun:?}");
}

fn with_too_few_survivors_all_go_back() {
    let seen = run(2, 2, 1, "1:22:within");
    seen.check();
    // To the commit before.
    let begun: Vec<u64> = seen.begun.iter().map(|begun| begun.1).collect();
    assert_eq!((begun, seen.thinned()), (vec![0, 0, 21, 21], vec![]));
}

fn another_collective_that_is_cut_off_leads_back() {
    let seen = run(3, 2, 0, "2:22:elsewhere");
    seen.check();
    let begun: Vec<u64> = seen.begun.iter().map(|begun| begun.1).collect();
    assert_eq!((begun, seen.thinned(), seen.worlds()), (vec![0, 0, 0, 21, 21], vec![], vec![3, 2]));
}

fn a_reduction_whose_beginning_is_lost_leads_back() {
    let seen = run(3, 2, 0, "lost,0:38:before");
    seen.check();
    let begun: Vec<u64> = seen.begun.iter().map(|begun| begun.1).collect();
    assert_eq!((begun, seen.worlds()), (vec![0, 0, 0, 35, 35], vec![3, 2]));
}
