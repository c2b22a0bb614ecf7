//! Collectives on values that can be serialised.

use phalanx::testing::{Fabric, run};
use phalanx::{Rank, group::MAX_OBJECT_BYTES};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Metrics {
    host: String,
    losses: Vec<f32>,
}

/// Longer for higher ranks.
fn metrics(rank: u32) -> Metrics {
    Metrics { host: format!("node{rank}"), losses: vec![0.5; rank as usize * 1000] }
}

#[test]
fn objects_reach_whom_they_are_for() {
    for fabric in Fabric::ALL {
        for world in [1, 2, 3, 5] {
            run(world, fabric, |group| {
                let rank = group.rank();
                let all: Vec<_> = (0..world).map(metrics).collect();
                assert_eq!(group.all_gather_object(&metrics(rank.get())).unwrap(), all);
                for root in group.world_size().ranks() {
                    let own = (rank == root).then(|| metrics(root.get()));
                    assert_eq!(group.broadcast_object(own.as_ref(), root).unwrap(), metrics(root.get()));
                    let gathered = group.gather_object(&metrics(rank.get()), root).unwrap();
                    assert_eq!(gathered, (rank == root).then(|| all.clone()));
                    let input = (rank == root).then_some(&all[..]);
                    assert_eq!(group.scatter_object(input, root).unwrap(), metrics(rank.get()));
                }
            });
        }
    }
}

#[test]
fn what_cannot_be_read_is_an_error_and_harms_nobody() {
    run(2, Fabric::Tcp, |group| {
        if group.rank().is_main() {
            group.broadcast_object(Some(&vec![300u16; 4]), Rank::MAIN).unwrap();
        } else {
            let error = group.broadcast_object::<bool>(None, Rank::MAIN).unwrap_err();
            assert!(error.is_mismatch() && error.peer() == Some(Rank::MAIN), "{error}");
        }
        group.barrier().unwrap();
    });
}

/// Says that it is a sequence of unknown length, which postcard cannot write.
struct Unwritable;

impl Serialize for Unwritable {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((0..3).filter(|number| *number != 1))
    }
}

impl<'de> Deserialize<'de> for Unwritable {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        bool::deserialize(deserializer).map(|_| Self)
    }
}

#[test]
fn what_cannot_be_written_or_is_too_long_is_refused_on_every_rank_alike() {
    run(3, Fabric::InProcess, |group| {
        assert!(group.all_gather_object(&Unwritable).is_err_and(|error| error.is_invalid_argument()));
        assert!(group.broadcast_object::<u8>(None, Rank::MAIN).unwrap_err().is_invalid_argument());
        let error = group.scatter_object::<u8>(Some(&[1, 2]), Rank::MAIN).unwrap_err();
        let said = match group.rank().is_main() {
            true => "brings 2 values for 3 ranks (bring one value for each rank",
            false => "rank 0 could not write its object (rank 0's own error says why)",
        };
        assert!(error.is_invalid_argument() && error.to_string().contains(said), "{error}");
        let long = group.rank().is_main().then(|| "x".repeat(MAX_OBJECT_BYTES + 1));
        let error = group.broadcast_object(long.as_ref(), Rank::MAIN).unwrap_err();
        assert!(error.to_string().contains("MAX_OBJECT_BYTES"), "{error}");
        group.barrier().unwrap();
    });
}
