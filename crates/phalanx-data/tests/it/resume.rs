//! A pass that is cut off, saved with a checkpoint, and continued by another number of ranks.

use std::sync::Mutex;

use phalanx::ProcessGroup;
use phalanx::checkpoint::Checkpoints;
use phalanx::sampler::Tail;
use phalanx::testing::{Fabric, run};
use phalanx_data::{DataLoader, Position};

use crate::support::numbers;

const ITEMS: usize = 101;

#[test]
fn a_checkpoint_in_the_middle_of_an_epoch_is_gone_on_with_by_other_numbers_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let seen = Mutex::new(vec![0; ITEMS]);
    let part = |group: &ProcessGroup, steps: usize| {
        let loader = DataLoader::builder(numbers(ITEMS)).shuffle(true).seed(5).tail(Tail::Split).group(group);
        let loader = loader.batch_size(4).num_workers(2).build().unwrap();
        let checkpoints = Checkpoints::open(folder.path(), group).unwrap();
        if let Some(saved) = checkpoints.newest().unwrap() {
            loader.resume(&saved.value::<Position>("data").unwrap()).unwrap();
        }
        for item in loader.iter().take(steps).flat_map(Result::unwrap) {
            seen.lock().unwrap()[item] += 1;
        }
        let position = loader.position();
        let number = if position.epoch() == 0 { position.consumed() } else { ITEMS };
        checkpoints.save(number as u64, |snapshot| snapshot.value("data", &position)).unwrap();
        checkpoints.finish().unwrap();
        position.consumed()
    };
    for (ranks, steps, consumed) in [(3, 4, 48), (2, 3, 72), (4, usize::MAX, 0)] {
        assert_eq!(
            run(ranks, Fabric::InProcess, |group| part(&group, steps)),
            vec![consumed; ranks as usize]
        );
    }
    assert_eq!(*seen.lock().unwrap(), vec![1; ITEMS], "each once");
}
