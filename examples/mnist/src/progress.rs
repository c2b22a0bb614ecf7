//! What a person sees. Rank 0 alone shows anything.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use phalanx::ProcessGroup;

/// A progress bar on a terminal, a line now and then elsewhere.
pub struct Progress {
    bar: ProgressBar,
    terminal: bool,
    shown: bool,
    ranks: usize,
    images: usize,
    start: Instant,
    last_line: Instant,
}

impl Progress {
    pub fn new(group: &ProcessGroup, steps: u64) -> Self {
        let (shown, ranks) = (group.rank().is_main(), group.world_size().count());
        let terminal = shown && stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(steps), target);
        if let Ok(style) =
            ProgressStyle::with_template("{bar:32.cyan/blue} {percent:>3} %  {msg}  {eta:.dim} left")
        {
            bar.set_style(style.progress_chars("━╸─"));
        }
        let now = Instant::now();
        let progress = Self { bar, terminal, shown, ranks, images: 0, start: now, last_line: now };
        progress.say(&format!("{ranks} {} in step", if ranks == 1 { "rank" } else { "ranks" }));
        progress
    }

    /// The share of all steps that is still to come.
    pub fn left(&self) -> f64 {
        1.0 - self.bar.position() as f64 / self.bar.length().unwrap_or(1) as f64
    }

    /// A step over `images` images of this rank is done.
    pub fn step(&mut self, images: usize, loss: Tensor<1>) {
        self.images += images * self.ranks;
        self.bar.inc(1);
        if !self.shown {
            return;
        }
        let message =
            format!("loss {:.4}  {:>6.0} images/s", loss.into_scalar::<f32>(), self.images_per_second());
        if self.terminal {
            self.bar.set_message(message);
        } else if self.last_line.elapsed() > Duration::from_secs(2) {
            self.last_line = Instant::now();
            eprintln!("{:>3.0} %  {message}  {:.0} s left", 100.0 * (1.0 - self.left()), self.seconds_left());
        }
    }

    /// An epoch has ended.
    pub fn epoch(&self, epoch: u64, accuracy: f64) {
        self.say(&format!("epoch {epoch:>2}  {:.2} % of unseen digits recognised", 100.0 * accuracy));
    }

    /// All has been done, and all replicas are the same.
    pub fn finish(self, accuracy: f64) {
        self.bar.finish_and_clear();
        self.say("all replicas hold the same bits");
        if self.shown {
            println!(
                "accuracy {:.2} %  ranks {}  {:.0} images/s  {:.1} s",
                100.0 * accuracy,
                self.ranks,
                self.images_per_second(),
                self.start.elapsed().as_secs_f64()
            );
            eprintln!("\n{}", summary(self.ranks, self.bar.position()));
        }
    }

    fn say(&self, line: &str) {
        if self.shown {
            self.bar.suspend(|| eprintln!("{line}"));
        }
    }

    fn images_per_second(&self) -> f64 {
        self.images as f64 / self.start.elapsed().as_secs_f64()
    }

    fn seconds_left(&self) -> f64 {
        let left = self.left();
        self.start.elapsed().as_secs_f64() * left / (1.0 - left).max(f64::EPSILON)
    }
}

/// What was done, and what to try next.
fn summary(ranks: usize, steps: u64) -> String {
    let done = match ranks {
        1 => format!(
            "One process took all {steps} steps. Train in two with --ranks 2: the epochs take less time."
        ),
        _ => format!(
            "{ranks} processes trained one network: in each of {steps} steps, each took a batch of its own share of the \
             digits,\nand all averaged their gradients while they were still being computed."
        ),
    };
    format!(
        "{done}\nTry --ranks 4, kill a process while they train, or see --help. The program is \
         examples/mnist/src/main.rs;\nhow to change yours in the same way: docs/guide/from-one-process-to-many.md"
    )
}
