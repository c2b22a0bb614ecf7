//! How fast a loader is, and how long a loop waits for it: the Rust half of `bench/loader/run.py`, which says what the work is.
//!
//! ```sh
//! cargo run --release -p phalanx-data --features lmdb --example throughput -- memory 4 0
//! cargo run --release -p phalanx-data --features lmdb --example throughput -- pack target/large 2048
//! cargo run --release -p phalanx-data --features lmdb --example throughput -- lmdb 4 0 target/large
//! ```
//!
//! `memory` makes items from bytes in memory, and batches with `collate_each`; `list` does so with `collate`, which gets the list of a
//! batch's items; `lmdb` reads them from a folder that `pack` has made, of so many MiB. Then come the workers, and the milliseconds that
//! the loop computes, that is sleeps, for each batch.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_data::lmdb::{LmdbDataset, LmdbWriter};
use phalanx_data::{DataLoader, DataLoaderBuilder, Dataset};

/// An image of 3 x 64 x 64 bytes.
const BYTES: usize = 3 * 64 * 64;
const ITEMS: usize = 20_000;
const BATCH: usize = 64;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["pack", path, mebibytes] => pack(Path::new(path), mebibytes.parse::<usize>()? << 20),
        [collate @ ("memory" | "list"), workers, compute] => {
            let loader = loader(Images((0..ITEMS).map(image).collect()), workers.parse()?);
            let loader = match *collate {
                "memory" => stacked(loader)?,
                _ => loader.collate(|images| Ok(images.concat())).build()?,
            };
            measure(&loader, compute.parse()?)
        }
        ["lmdb", workers, compute, path] => {
            let images = LmdbDataset::open(path)?.map(|bytes| Ok(normalized(&bytes)));
            measure(&stacked(loader(images, workers.parse()?))?, compute.parse()?)
        }
        _ => {
            Err("memory WORKERS MS, list WORKERS MS, lmdb WORKERS MS FOLDER, or pack FOLDER MEBIBYTES".into())
        }
    }
}

/// Images in memory.
struct Images(Vec<Vec<u8>>);

impl Dataset for Images {
    type Item = Vec<f32>;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> phalanx::Result<Vec<f32>> {
        Ok(normalized(&self.0[index]))
    }
}

fn image(n: usize) -> Vec<u8> {
    (0..BYTES).map(|place| (n.wrapping_mul(31).wrapping_add(place * 7)) as u8).collect()
}

/// As torchvision's `ToTensor` and `Normalize`.
fn normalized(bytes: &[u8]) -> Vec<f32> {
    bytes.iter().map(|byte| (f32::from(*byte) / 255.0 - 0.5) / 0.25).collect()
}

fn pack(path: &Path, bytes: usize) -> Result<(), Box<dyn Error>> {
    let mut writer = LmdbWriter::create(path)?;
    for n in 0..bytes.div_ceil(BYTES) {
        writer.push(&image(n))?;
    }
    println!("{} items", writer.finish()?);
    Ok(())
}

/// In shuffled batches.
fn loader<D>(dataset: D, workers: usize) -> DataLoaderBuilder<D>
where
    D: Dataset<Item = Vec<f32>> + 'static,
{
    DataLoader::builder(dataset).shuffle(true).batch_size(BATCH).num_workers(workers).drop_last(true)
}

/// Adds each image to its batch when it is read.
fn stacked<D>(loader: DataLoaderBuilder<D>) -> phalanx::Result<DataLoader<D, Vec<f32>>>
where
    D: Dataset<Item = Vec<f32>> + 'static,
{
    let add = |batch: &mut Vec<f32>, image: Vec<f32>| {
        batch.extend_from_slice(&image);
        Ok(())
    };
    loader.collate_each(|images| Vec::with_capacity(images * BYTES), add).build()
}

fn measure<D>(loader: &DataLoader<D, Vec<f32>>, compute: f64) -> Result<(), Box<dyn Error>>
where
    D: Dataset<Item = Vec<f32>> + 'static,
{
    let begin = Instant::now();
    let (mut batches, mut items, mut sum) = (loader.iter(), 0, 0.0);
    while let Some(batch) = batches.next().transpose()? {
        (items, sum) = (items + BATCH, sum + batch[17]);
        if compute > 0.0 {
            std::thread::sleep(Duration::from_secs_f64(compute / 1e3));
        }
    }
    let (taken, steps) = (begin.elapsed().as_secs_f64(), (items / BATCH) as f64);
    println!(
        "{:.0} items/s, {:.3} ms of waiting a step, {items} items, checksum {sum:.1}",
        items as f64 / taken,
        batches.waited().as_secs_f64() * 1e3 / steps
    );
    Ok(())
}
