//! How fast a loader is, and how long a loop waits for it: the Rust half of `bench/loader/run.py`, which says what the works are, and
//! makes the files.
//!
//! ```sh
//! cargo build --release -p phalanx-data --features image,lmdb --example throughput
//! target/release/examples/throughput WORK FILES WORKERS [--compute MS] [--steps N] [--passes N]
//! target/release/examples/throughput pack target/large 2048
//! ```
//!
//! Works are `memory`, `list`, `jpeg`, `tokens` and `lmdb`. `pack` makes a data set for `lmdb` of so many MiB, in place of run.py's. The first
//! pass warms up. It prints what the passes behind it took, as JSON.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use phalanx_data::folder::ImageFolder;
use phalanx_data::lmdb::{LmdbDataset, LmdbWriter};
use phalanx_data::transforms::{Normalize, Resize};
use phalanx_data::{DataLoader, DataLoaderBuilder, Dataset, InMemory};
use rustix::time::{ClockId, clock_gettime};
use tokenizers::Tokenizer;

/// An image of 3 x 64 x 64 bytes.
const BYTES: usize = 3 * 64 * 64;
const ITEMS: usize = 19_968;
const BATCH: usize = 64;
/// Steps of a pass whose waits do not count: the workers have just begun.
const FIRST: usize = 4;
/// A side of what JPEG files become.
const SIDE: u32 = 224;

type Outcome = Result<(), Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["pack", path, mebibytes] => pack(Path::new(path), mebibytes.parse::<usize>()? << 20),
        [work, files, workers, options @ ..] => {
            let run = Run::new(workers, options)?;
            let files = Path::new(files);
            match *work {
                "memory" => run.stacks(Images::new()),
                "list" => run.lists(Images::new()),
                "lmdb" => {
                    run.stacks(LmdbDataset::open(files.join("lmdb"))?.map(|bytes| Ok(normalized(&bytes))))
                }
                "jpeg" => run.jpeg(files),
                "tokens" => run.tokens(files),
                other => Err(format!("there is no work {other}").into()),
            }
        }
        _ => {
            Err("WORK FILES WORKERS [--compute MS] [--steps N] [--passes N], or pack FOLDER MEBIBYTES".into())
        }
    }
}

/// Images in memory.
struct Images(Vec<Vec<u8>>);

impl Images {
    fn new() -> Self {
        Self((0..ITEMS).map(image).collect())
    }
}

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

fn pack(path: &Path, bytes: usize) -> Outcome {
    let mut writer = LmdbWriter::create(path)?;
    for n in 0..bytes.div_ceil(BYTES) {
        writer.push(&image(n))?;
    }
    println!("{} items", writer.finish()?);
    Ok(())
}

struct Run {
    workers: usize,
    /// What the loop sleeps a step, as if a GPU computed.
    compute_delay: Duration,
    /// The most steps of a pass.
    steps: usize,
    passes: usize,
}

impl Run {
    fn new(workers: &str, options: &[&str]) -> Result<Self, Box<dyn Error>> {
        let mut run =
            Self { workers: workers.parse()?, compute_delay: Duration::ZERO, steps: usize::MAX, passes: 2 };
        for option in options.chunks(2) {
            match option {
                ["--compute", milliseconds] => {
                    run.compute_delay = Duration::try_from_secs_f64(milliseconds.parse::<f64>()? / 1e3)?;
                }
                ["--steps", steps] => run.steps = steps.parse()?,
                ["--passes", passes] => run.passes = passes.parse()?,
                other => return Err(format!("there is no option {other:?}").into()),
            }
        }
        Ok(run)
    }

    /// In shuffled batches.
    fn loader<D: Dataset<Item: Send> + 'static>(&self, dataset: D) -> DataLoaderBuilder<D> {
        DataLoader::builder(dataset).shuffle(true).batch_size(BATCH).num_workers(self.workers)
    }

    /// Adds each image to its batch when it is read.
    fn stacks(&self, images: impl Dataset<Item = Vec<f32>> + 'static) -> Outcome {
        let add = |batch: &mut Vec<f32>, image: Vec<f32>| {
            batch.extend_from_slice(&image);
            Ok(())
        };
        let loader = self.loader(images).collate_each(|images| Vec::with_capacity(images * BYTES), add);
        self.measure(&loader.build()?, |batch| floats(batch))
    }

    /// Copies the list of a batch's images into one.
    fn lists(&self, images: impl Dataset<Item = Vec<f32>> + 'static) -> Outcome {
        self.measure(&self.loader(images).collate(|images| Ok(images.concat())).build()?, |batch| {
            floats(batch)
        })
    }

    /// Decodes and scales files.
    fn jpeg(&self, files: &Path) -> Outcome {
        let (resize, normalize) = (Resize::exact(SIDE, SIDE), Normalize::imagenet());
        let images = ImageFolder::open(files.join("jpeg"))?
            .map(move |sample| Ok((resize.apply(&sample.image)?, sample.class)));
        let pixels = 3 * (SIDE * SIDE) as usize;
        let loader = self.loader(images).collate_each(
            move |images| (Vec::with_capacity(images * pixels), Vec::with_capacity(images)),
            move |(batch, classes): &mut (Vec<f32>, Vec<i64>), (image, class)| {
                normalize.add_to(&image, batch);
                classes.push(class as i64);
                Ok(())
            },
        );
        let loader = loader.reuse(|(batch, classes)| {
            batch.clear();
            classes.clear();
        });
        self.measure(&loader.build()?, |(batch, classes)| {
            let sampled = batch.chunks(pixels).flat_map(|image| image.iter().step_by(1001));
            let sampled: f64 = sampled.map(|value| f64::from(*value).powi(2)).sum();
            let classes: i64 = classes.iter().sum();
            (batch.len() / pixels, sampled + classes as f64)
        })
    }

    /// Makes padded batches of tokens of lines.
    fn tokens(&self, files: &Path) -> Outcome {
        let lines: InMemory<String> =
            std::fs::read_to_string(files.join("lines.txt"))?.lines().map(String::from).collect();
        let tokenizer =
            Tokenizer::from_file(files.join("tokenizer.json")).map_err(|error| error.to_string())?;
        let loader = self.loader(lines).collate(move |lines| {
            let encoded = tokenizer.encode_batch_fast(lines, false).map_err(phalanx::Error::other)?;
            let longest = encoded.iter().map(|line| line.len()).max().unwrap_or(0);
            let mut batch = vec![0_i64; encoded.len() * longest];
            for (row, line) in batch.chunks_mut(longest.max(1)).zip(&encoded) {
                row.iter_mut().zip(line.get_ids()).for_each(|(place, id)| *place = i64::from(*id));
            }
            Ok((batch, encoded.len()))
        });
        self.measure(&loader.build()?, |(batch, lines)| (*lines, batch.iter().sum::<i64>() as f64))
    }

    /// `read` gives the number of items in a batch, and a sum of what is in it.
    fn measure<D, B>(&self, loader: &DataLoader<D, B>, read: impl Fn(&B) -> (usize, f64)) -> Outcome
    where
        D: Dataset + 'static,
        B: Send + 'static,
    {
        let (start, processor) = (pss()?, cpu());
        let (mut all, mut checksum) = (0, 0.0);
        let (mut items, mut steps, mut seconds, mut waited) = (0, 0, 0.0, 0.0);
        for pass in 0..=self.passes {
            let begin = Instant::now();
            let mut batches = loader.iter();
            let (mut passed, mut taken, mut first) = (0, 0, Duration::ZERO);
            while taken < self.steps
                && let Some(batch) = batches.next().transpose()?
            {
                let (some, sum) = read(&batch);
                (passed, taken, checksum) = (passed + some, taken + 1, checksum + sum);
                batches.recycle(batch);
                if taken == FIRST {
                    first = batches.waited();
                }
                if self.compute_delay > Duration::ZERO {
                    std::thread::sleep(self.compute_delay);
                }
            }
            all += passed;
            if pass > 0 {
                (items, steps) = (items + passed, steps + taken.saturating_sub(FIRST));
                seconds += begin.elapsed().as_secs_f64();
                waited += (batches.waited() - first).as_secs_f64();
            }
        }
        let result = serde_json::json!({
            "items": items,
            "seconds": seconds,
            "waited_ms": waited * 1e3 / steps as f64,
            "cpu_us": (cpu() - processor) * 1e6 / all as f64,
            "checksum": checksum / all as f64,
            "start_mib": start,
        });
        println!("{result}");
        Ok(())
    }
}

/// The number of images, and the sum of the square of one value of each.
fn floats(batch: &[f32]) -> (usize, f64) {
    let values = batch.iter().skip(17).step_by(BYTES);
    (batch.len() / BYTES, values.map(|value| f64::from(*value).powi(2)).sum())
}

/// Seconds of processors that this process has used.
fn cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// MiB of this process.
fn pss() -> Result<f64, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line =
        text.lines().find_map(|line| line.strip_prefix("Pss:")).ok_or("the system does not say Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
