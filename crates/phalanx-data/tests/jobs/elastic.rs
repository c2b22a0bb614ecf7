//! A loader in elastic jobs, of which a worker dies in the middle of an epoch.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use phalanx::elastic::{self, Plain};
use phalanx::launch::{Event, Job, Outcome};
use phalanx::sampler::ElasticSampler;
use phalanx::{ReduceOp, Result, WorldSize};
use phalanx_data::{DataLoader, InMemory, Position};

use crate::harness::{ROLE, run_job};

pub const TESTS: &[(&str, fn())] = &[
    ("the_samples_of_a_rank_that_dies_in_a_step_come_again", || check(STEP)),
    ("after_a_death_the_last_commit_s_position_is_gone_on_with_by_fewer_ranks", || check(COMMIT)),
];

/// What happens to the step in which a rank dies: the survivors take it again, or all go back to the last commit.
pub const STEP: &str = "elastic-step";
pub const COMMIT: &str = "elastic-commit";
const FOLDER: &str = "PHALANX_TEST_FOLDER";
const ITEMS: usize = 100;
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);

fn check(role: &str) {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::new(std::env::current_exe().unwrap(), WorldSize::new(3).unwrap());
    let job = job.variable(ROLE, role).variable(FOLDER, folder.path()).grace(Duration::from_secs(5));
    let mut said = String::new();
    let report = run_job(&job.min_workers(WorldSize::new(2).unwrap()), LIMIT, |event| {
        if let Event::Line { text, .. } = event {
            said += &format!("{}\n", String::from_utf8_lossy(text));
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?}\n{said}", report.outcome);
    assert!(said.contains("goes on with 2"), "nobody has died: {said}");
    let ends: Vec<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|file| fs::read_to_string(file.unwrap().path()).unwrap())
        .collect();
    assert_eq!(ends, vec![format!("{:?}", vec![1_i32; ITEMS]); 2], "each item once, on both\n{said}");
}

/// Counts how often each item of one epoch has been in a step.
pub fn train(role: &str) -> Result<()> {
    crate::harness::abort_after(LIMIT);
    let loader =
        DataLoader::builder((0..ITEMS).collect::<InMemory<_>>()).sampler(ElasticSampler::new(ITEMS).seed(7));
    let loader = loader.batch_size(3).num_workers(2).build()?;
    let mut state = Plain((vec![0_i32; ITEMS], loader.position()));
    let rank = elastic::run(
        &mut state,
        |context: &mut elastic::Context<'_, Plain<(Vec<i32>, Position)>>, group| {
            loader.set_group(group);
            loader.resume(&context.state.0.1)?;
            let (mut batches, mut steps) = (loader.iter(), 0);
            while let Some(batch) = batches.next().transpose()? {
                steps += 1;
                if context.world_size().get() == 3 && steps == 5 && context.rank().get() == 1 {
                    std::process::abort();
                }
                let count = |group: &phalanx::ProcessGroup| {
                    let mut counts = vec![0_i32; ITEMS];
                    batch.iter().for_each(|item| counts[*item] += 1);
                    group.all_reduce(&mut counts, ReduceOp::Sum).map(|()| counts)
                };
                let counts = if role == STEP {
                    let step = context.step(|_, group| count(group))?;
                    batches.regroup(&step.missing, context.rank(), context.world_size());
                    step.value
                } else {
                    count(context.group())?
                };
                let (seen, position) = &mut context.state.0;
                seen.iter_mut().zip(counts).for_each(|(seen, count)| *seen += count);
                *position = loader.position();
                if steps % 3 == 0 {
                    context.commit()?;
                }
                if context.world_size().get() == 2 {
                    println!("goes on with 2");
                }
            }
            Ok::<_, phalanx::Error>(context.rank())
        },
    )?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap_or_default());
    fs::write(folder.join(rank.to_string()), format!("{:?}", state.0.0)).map_err(phalanx::Error::other)
}
