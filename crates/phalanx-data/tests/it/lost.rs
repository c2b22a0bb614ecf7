//! The traps of the articles: "a data set shorter than the world".

use phalanx_data::{DataLoader, StreamLoader};

use crate::stream::Numbers;
use crate::support::{numbers, shards};

#[test]
fn a_data_set_shorter_than_the_world_is_an_error_on_every_rank() {
    for (rank, world) in shards(4) {
        let outcomes = [
            DataLoader::builder(numbers(3)).shard(rank, world).build().map(drop),
            StreamLoader::builder(Numbers(9)).shards(3).shard(rank, world).build().map(drop),
        ];
        for outcome in outcomes {
            let text = outcome.unwrap_err().to_string();
            assert!(text.contains("3") && text.contains("too few for 4 ranks"), "{text}");
        }
    }
}
