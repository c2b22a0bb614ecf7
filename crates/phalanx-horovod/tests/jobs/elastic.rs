//! An elastic job: one worker dies, the handles fail while all live, two workers fail by themselves, and the rest goes on.

use std::path::Path;
use std::time::Duration;

use phalanx::elastic::Plain;
use phalanx::launch::{Event, Job, Outcome};
use phalanx::{Error, Rank, WorldSize};
use phalanx_horovod::elastic::{self, ObjectState, State};
use phalanx_horovod::{Horovod, Op};

use crate::harness::{ROLE, run_job};

/// The folder in which a mishap notes that it has happened.
const MISHAPS: &str = "PHALANX_TEST_HOROVOD_MISHAPS";
/// No job takes longer, or it hangs.
const LIMIT: Duration = Duration::from_secs(120);
const STEPS: u64 = 60;
/// Where the workers wait for each other: a step with a commit.
const HOLD: u64 = 55;

type Training = Plain<(u64, Vec<f32>)>;

/// What a worker does.
pub fn work() {
    crate::harness::abort_after(LIMIT);
    let mut state = ObjectState::new(Plain((0, vec![0.0; 8])));
    state.register_reset_callbacks([Box::new(|state: &mut Training, hvd: &Horovod| {
        println!("reset {} at {}", hvd.size(), state.0.0);
        Ok(())
    }) as _]);
    match elastic::run(&mut state, train) {
        Ok(size) => println!("done {size} {:?}", state.0),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(1);
        }
    }
}

fn train(state: &mut State<'_, '_, Training>, hvd: &Horovod) -> phalanx::Result<u32> {
    println!("begins with {} at {}", hvd.size(), state.0.0);
    // A rank that ends with an error leaves it before the others learn that it is gone, and it is what they wait for first.
    let all: Vec<Rank> = (0..hvd.size()).map(Rank::new).collect();
    let set = hvd.add_process_set(&all)?.unwrap();
    while state.0.0 < STEPS {
        // However late the replacements are: commits that change nothing let them in.
        while state.0.0 == HOLD && hvd.size() < 3 {
            std::thread::sleep(Duration::from_millis(5));
            state.commit()?;
        }
        let handles =
            [("a", &set), ("b", hvd)].map(|(name, hvd)| hvd.allreduce_async(name, [1.0f32; 4], Op::Average));
        for (place, handle) in handles.into_iter().enumerate() {
            let average = handle?.synchronize()?;
            let weights = &mut state.0.1[place * 4..];
            weights.iter_mut().zip(average.as_slice::<f32>()?).for_each(|(weight, value)| *weight += value);
        }
        state.0.0 += 1;
        match state.0.0 {
            // Each behind a commit: three steps are repeated.
            23 if happens("1") => std::process::abort(),
            // As where a connection of the handles alone is too slow.
            33 if happens("0") => hvd.abort(Error::timeout("a part of a tensor did not come in time")),
            43 if happens("2") => return Err(Error::invalid_argument("a sample that cannot be read")),
            // As where a gradient cannot be read from its device.
            53 if happens("0 leaves") => {
                hvd.shutdown();
                return Err(Error::aborted("a gradient that cannot be read"));
            }
            step if step.is_multiple_of(5) => state.commit()?,
            _ => {}
        }
    }
    state.0.0 = 7;
    state.restore()?;
    assert_eq!(state.0.0, STEPS, "the last commit");
    if hvd.rank().is_main() {
        state.0.0 = 1000;
    }
    state.sync()?;
    Ok(hvd.size())
}

/// Whether it is this worker's turn to fail, which happens once at each place, that begins with its local rank.
fn happens(place: &str) -> bool {
    let folder = std::env::var(MISHAPS).unwrap();
    place.starts_with(&std::env::var("LOCAL_RANK").unwrap())
        && std::fs::File::create_new(Path::new(&folder).join(place)).is_ok()
}

pub fn the_others_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let job = Job::new(std::env::current_exe().unwrap(), WorldSize::new(3).unwrap())
        .variable(ROLE, "elastic")
        .variable("HOROVOD_NUM_NCCL_STREAMS", "2")
        .variable(MISHAPS, folder.path())
        .min_workers(WorldSize::new(2).unwrap())
        .max_restarts(3)
        .grace(Duration::from_secs(2));
    let (mut lines, mut errors) = (Vec::new(), String::new());
    let report = run_job(&job, LIMIT, |event| {
        if let Event::Line { stream, text, .. } = event {
            let text = String::from_utf8_lossy(text).into_owned();
            match stream {
                phalanx::launch::Stream::Stdout => lines.push(text),
                phalanx::launch::Stream::Stderr => errors += &format!("{text}\n"),
            }
        }
    });
    assert!(matches!(report.outcome, Outcome::Succeeded), "{:?} {lines:?} {errors}", report.outcome);
    assert_eq!(report.replacements, 3, "{lines:?} {errors}");
    let count = |what: &str| lines.iter().filter(|line| line.starts_with(what)).count();
    // Each step counts once, whatever was repeated.
    let end = format!("done 3 (1000, {:?})", vec![STEPS as f32; 8]);
    assert_eq!(count(&end), 3, "{lines:?} {errors}");
    for own in ["a sample that cannot be read", "a gradient that cannot be read"] {
        assert!(errors.contains(own), "{errors}");
    }
    assert_eq!(errors.matches("HOROVOD_NUM_NCCL_STREAMS has no meaning").count(), 1, "{errors}");
    // Those who live after each mishap go on from the last commit, and the callback is theirs alone.
    for commit in [20, 30, 40] {
        let at = |what: &str| {
            lines
                .iter()
                .filter(|line| line.starts_with(what) && line.ends_with(&format!(" at {commit}")))
                .count()
        };
        assert!(at("reset") >= 2 && at("begins") >= at("reset"), "{lines:?} {errors}");
    }
    assert_eq!(count("begins with 3 at 0"), 3, "{lines:?}");
}
