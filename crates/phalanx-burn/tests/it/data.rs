//! Our loaders as Burn's.

use std::sync::Arc;

use crate::common::{device, plain};
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{self, DataLoader as _};
use burn::data::dataset::Dataset as _;
use burn::tensor::{Device, Tensor};
use phalanx::Error;
use phalanx_burn::data::{BurnLoader, FromBurn, ToBurn};
use phalanx_data::{DataLoader, Dataset as _, InMemory};

struct Stack;

impl Batcher<f32, Tensor<1>> for Stack {
    fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
        Tensor::from_floats(items.as_slice(), device)
    }
}

fn samples() -> Vec<f32> {
    (0..50).map(|n| n as f32).collect()
}

/// All samples of a pass, and the progress behind each batch.
fn pass(loader: &dyn dataloader::DataLoader<Tensor<1>>) -> (Vec<f32>, Vec<usize>) {
    let (mut samples, mut progress, mut batches) = (Vec::new(), Vec::new(), loader.iter());
    while let Some(batch) = batches.next() {
        samples.extend(batch.unwrap().into_data().try_to_vec::<f32>().unwrap());
        progress.push(batches.progress().items_processed);
    }
    assert!(batches.progress().is_completed());
    (samples, progress)
}

#[test]
fn a_loader_is_burn_s_with_its_batcher() {
    let loader = DataLoader::builder(InMemory::new(samples()))
        .shuffle(true)
        .seed(3)
        .batch_size(20)
        .num_workers(2)
        .build()
        .unwrap();
    let burn = BurnLoader::new(&loader, Stack, &plain()).shared();
    assert_eq!(burn.num_items(), 50);
    let ((first, progress), (second, _)) = (pass(&*burn), pass(&*burn));
    assert_eq!(progress, [20, 40, 50]);
    assert_ne!(first, second, "each pass is another epoch's");
    let plain: Vec<f32> = loader.iter().flat_map(Result::unwrap).collect();
    assert_eq!(first, plain);
    // As a trainer cuts it for two ranks, on devices of their own.
    let device = device();
    let parts = [burn.slice(0, 25), burn.slice(25, 50)].map(|part| part.to_device(&device));
    assert!(parts.iter().all(|part| part.num_items() == 25));
    let again = BurnLoader::new(&loader, Stack, &device).shared();
    let mut both = [pass(&*parts[0]).0, pass(&*parts[1]).0].concat();
    both.sort_by(f32::total_cmp);
    assert_eq!(both, samples());
    assert_eq!(again.num_items(), 50);
}

/// Trainers that add up gradients do the last step where the pass says that it is complete.
#[test]
fn a_pass_that_was_begun_before_is_complete_at_its_end() {
    let loader = || DataLoader::builder(InMemory::new(samples())).batch_size(20).build().unwrap();
    let begun = loader();
    begun.iter().next().unwrap().unwrap();
    let rest = loader();
    rest.resume(&begun.position()).unwrap();
    let burn = BurnLoader::new(&rest, Stack, &plain()).shared();
    assert_eq!(pass(&*burn), (samples()[20..].to_vec(), vec![40, 50]));
    assert_eq!(pass(&*burn), (samples(), vec![20, 40, 50]));
}

#[test]
fn a_pass_that_drops_its_last_batch_is_complete_at_its_end() {
    let loader = DataLoader::builder(InMemory::new(samples())).batch_size(20).drop_last(true);
    let loader = loader.build().unwrap();
    let burn = BurnLoader::new(&loader, Stack, &plain()).shared();
    for _ in 0..2 {
        assert_eq!(pass(&*burn), (samples()[..40].to_vec(), vec![20, 40]));
    }
    // So is the rest of a pass, and each part.
    loader.iter().next().unwrap().unwrap();
    let rest = BurnLoader::new(&loader, Stack, &plain());
    assert_eq!(pass(&rest), (samples()[20..40].to_vec(), vec![40]));
    let part = burn.slice(0, 25);
    assert_eq!(pass(&*part), (samples()[..20].to_vec(), vec![20]));
}

#[test]
fn data_sets_go_both_ways_with_their_errors() {
    let flawed =
        InMemory::new(samples()).map(|n| if n == 7.0 { Err(Error::other("a torn file")) } else { Ok(n) });
    let there = ToBurn(Arc::new(flawed));
    assert_eq!((there.len(), there.get(3).unwrap()), (50, 3.0));
    let back = FromBurn::new(there);
    let loader = DataLoader::builder(back).batch_size(10).build().unwrap();
    let burn = BurnLoader::new(&loader, Stack, &plain());
    let error = burn.iter().next().unwrap().err().unwrap().to_string();
    assert!(error.contains("item 7") && error.contains("a torn file"), "{error}");
    assert_eq!(burn.loader().dataset().len(), 50);
}
