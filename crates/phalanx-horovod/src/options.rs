//! Settings, and the `HOROVOD_*` variables.

use std::path::PathBuf;
use std::time::Duration;

use phalanx::{Error, Result};

/// The default size of a fused batch.
pub const DEFAULT_FUSION_THRESHOLD: usize = 64 << 20;
/// The default time from one cycle of negotiation to the next.
pub const DEFAULT_CYCLE_TIME: Duration = Duration::from_millis(1);
/// The default number of names that travel as bits.
pub const DEFAULT_CACHE_CAPACITY: usize = 1024;
/// The default time until a warning of tensors that some ranks lack.
pub const DEFAULT_STALL_CHECK_TIME: Duration = Duration::from_secs(60);

/// The most bytes of a batch. A batch is allocated at once.
const MAX_FUSION_THRESHOLD: usize = 1 << 40;
const CYCLE_TIME_LIMIT: Duration = Duration::from_secs(10);
/// In effect for ever: more than 31 years.
const STALL_TIME_LIMIT: Duration = Duration::from_secs(1_000_000_000);
/// Every slot is a bit of each cycle's message.
const MAX_CACHE_CAPACITY: usize = 1 << 20;

/// How ranks negotiate. All ranks use rank 0's fusion threshold, cycle time, cache capacity and stall times.
///
/// ```
/// use std::time::Duration;
/// use phalanx_horovod::Options;
/// let options = Options { cycle_time: Duration::from_micros(500), ..Options::from_env()? };
/// # Ok::<(), phalanx::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The most bytes of tensors that are reduced as one. 0: each by itself. Fusion buffers hold no more, in whole pages, but
    /// for what travels in another type or as an Adasum and is larger by itself: at least 1 MiB of the first, all of the second.
    pub fusion_threshold: usize,
    /// The time from one cycle to the next, at least: longer means larger batches, shorter less delay. A program that waits for a
    /// handle does not wait for it. More than a quarter of the group's time-out counts as that.
    pub cycle_time: Duration,
    /// How many names are remembered, so that they travel as bits. 0: none.
    pub cache_capacity: usize,
    /// After how long tensors that some ranks lack are reported, and ranks that have not joined while others have and nothing
    /// is carried out. `None`: never.
    pub stall_check_time: Option<Duration>,
    /// After how long they end the job. `None`: the time-out of the group. The most is 1,000,000,000 s, which is in effect never.
    pub stall_shutdown_time: Option<Duration>,
    /// Measures fusion thresholds and cycle times while the program runs, and keeps the best. What is set with
    /// `HOROVOD_FUSION_THRESHOLD` or `HOROVOD_CYCLE_TIME` stays as it is.
    pub autotune: bool,
    /// The file of a trace with the negotiation of each tensor in it. `None`: that of `PHALANX_TRACE`, if there is one.
    pub timeline: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            fusion_threshold: DEFAULT_FUSION_THRESHOLD,
            cycle_time: DEFAULT_CYCLE_TIME,
            cache_capacity: DEFAULT_CACHE_CAPACITY,
            stall_check_time: Some(DEFAULT_STALL_CHECK_TIME),
            stall_shutdown_time: None,
            autotune: false,
            timeline: None,
        }
    }
}

/// Variables of Horovod that have no meaning here, with what there is in place of them.
const WITHOUT_MEANING: &[(&str, &str)] = &[
    ("HOROVOD_ADASUM_MPI_CHUNK_SIZE", "Adasum sends whole batches"),
    ("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune tries each setting in turn"),
    ("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "autotune tries each setting in turn"),
    ("HOROVOD_AUTOTUNE_LOG", "autotune logs what it chooses"),
    ("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "autotune measures for 1.5 s at least, without pauses"),
    ("HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "autotune measures for 1.5 s at least, without pauses"),
    ("HOROVOD_BATCH_D2D_MEMCOPIES", "there is no GPU"),
    ("HOROVOD_CCL_BGT_AFFINITY", "the collectives are Phalanx's"),
    ("HOROVOD_CCL_CACHE", "the collectives are Phalanx's"),
    ("HOROVOD_CONTROLLER", "the controller is Phalanx's"),
    ("HOROVOD_CPU_OPERATIONS", "the collectives are Phalanx's"),
    ("HOROVOD_DISABLE_GROUP_FUSION", "the tensors of a group are fused like others"),
    ("HOROVOD_DYNAMIC_PROCESS_SETS", "process sets can always be added"),
    ("HOROVOD_ENABLE_ASYNC_COMPLETION", "there is no GPU"),
    ("HOROVOD_ENABLE_XLA_OPS", "there is no XLA"),
    ("HOROVOD_GLOO_IFACE", "use GLOO_SOCKET_IFNAME"),
    ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "use MASTER_ADDR"),
    ("HOROVOD_GLOO_RENDEZVOUS_PORT", "use MASTER_PORT"),
    (
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "use HOROVOD_STALL_SHUTDOWN_TIME_SECONDS, or in Rust ProcessGroup::with_timeout",
    ),
    ("HOROVOD_HIERARCHICAL_ALLGATHER", "ranks of one host always share memory"),
    ("HOROVOD_HIERARCHICAL_ALLREDUCE", "ranks of one host always share memory"),
    ("HOROVOD_LOG_HIDE_TIME", "Rust's programs have a tracing subscriber, Python's warnings alone"),
    ("HOROVOD_LOG_LEVEL", "Rust's programs have a tracing subscriber, Python's warnings alone"),
    ("HOROVOD_LOG_TIMESTAMP", "Rust's programs have a tracing subscriber, Python's warnings alone"),
    ("HOROVOD_MLSL_BGT_AFFINITY", "the collectives are Phalanx's"),
    ("HOROVOD_MPI_THREADS_DISABLE", "there is no MPI"),
    ("HOROVOD_NUM_NCCL_STREAMS", "there is no NCCL"),
    ("HOROVOD_THREAD_AFFINITY", "Phalanx chooses the processors of its threads"),
    ("HOROVOD_TIMELINE_MARK_CYCLES", "the timeline always has the rounds of negotiation"),
];

impl Options {
    /// The defaults, changed by the variables of Horovod that are set:
    ///
    /// | variable | sets | unit |
    /// |---|---|---|
    /// | `HOROVOD_FUSION_THRESHOLD` | [`fusion_threshold`](Self::fusion_threshold) | bytes |
    /// | `HOROVOD_CYCLE_TIME` | [`cycle_time`](Self::cycle_time) | milliseconds, such as 3.5 |
    /// | `HOROVOD_CACHE_CAPACITY` | [`cache_capacity`](Self::cache_capacity) | names |
    /// | `HOROVOD_STALL_CHECK_TIME_SECONDS` | [`stall_check_time`](Self::stall_check_time) | seconds |
    /// | `HOROVOD_STALL_CHECK_DISABLE` | no [`stall_check_time`](Self::stall_check_time), and the most [`stall_shutdown_time`](Self::stall_shutdown_time) | 1 or 0 |
    /// | `HOROVOD_STALL_SHUTDOWN_TIME_SECONDS` | [`stall_shutdown_time`](Self::stall_shutdown_time) | seconds; 0: the most |
    /// | `HOROVOD_AUTOTUNE` | [`autotune`](Self::autotune) | 1 or 0 |
    /// | `HOROVOD_TIMELINE` | [`timeline`](Self::timeline) | a path; `DYNAMIC`: none yet |
    ///
    /// A variable that is empty counts as unset. Other variables of Horovod have no meaning here: rank 0 warns of each that
    /// is set.
    ///
    /// # Errors
    /// If a value is not valid; the error names the variable.
    pub fn from_env() -> Result<Self> {
        Variables { lookup: &phalanx::env::variable }.options()
    }

    /// Checks what a program has set, or rank 0.
    pub(crate) fn check(&self) -> Result<()> {
        let Self {
            fusion_threshold, cycle_time, cache_capacity, stall_check_time, stall_shutdown_time, ..
        } = self;
        let refuse = |what: String| {
            Err(Error::invalid_argument(what)
                .with_remedy("set another value in the Options of rank 0, which all ranks use"))
        };
        if *fusion_threshold > MAX_FUSION_THRESHOLD {
            return refuse(format!(
                "fusion_threshold is {fusion_threshold} bytes: at most {MAX_FUSION_THRESHOLD} are allowed"
            ));
        }
        if *cycle_time > CYCLE_TIME_LIMIT {
            return refuse(format!("cycle_time is {cycle_time:?}: at most {CYCLE_TIME_LIMIT:?} is allowed"));
        }
        if *cache_capacity > MAX_CACHE_CAPACITY {
            return refuse(format!(
                "cache_capacity is {cache_capacity} names: at most {MAX_CACHE_CAPACITY} are allowed"
            ));
        }
        let times = [("stall_check_time", stall_check_time), ("stall_shutdown_time", stall_shutdown_time)];
        match times
            .iter()
            .find(|(_, time)| time.is_some_and(|time| time.is_zero() || time > STALL_TIME_LIMIT))
        {
            Some((name, _)) => {
                refuse(format!("{name} must be more than 0 and at most {} s", STALL_TIME_LIMIT.as_secs()))
            }
            None => Ok(()),
        }
    }
}

/// Whether a variable has a value: one without is as one that is not set.
pub(crate) fn is_set(name: &str) -> bool {
    Variables { lookup: &phalanx::env::variable }.text(name).is_some()
}

/// Warnings of set variables that have no meaning.
pub(crate) fn warnings(is_set: impl Fn(&str) -> bool) -> impl Iterator<Item = String> {
    let set = WITHOUT_MEANING.iter().filter(move |(name, _)| is_set(name));
    set.map(|(name, instead)| format!("{name} has no meaning here: {instead}"))
}

struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl Variables<'_> {
    fn options(&self) -> Result<Options> {
        let defaults = Options::default();
        let threshold = self.number("HOROVOD_FUSION_THRESHOLD", MAX_FUSION_THRESHOLD as f64, true)?;
        let cycle = self.number("HOROVOD_CYCLE_TIME", CYCLE_TIME_LIMIT.as_secs_f64() * 1e3, false)?;
        let capacity = self.number("HOROVOD_CACHE_CAPACITY", MAX_CACHE_CAPACITY as f64, true)?;
        let check = self.number("HOROVOD_STALL_CHECK_TIME_SECONDS", STALL_TIME_LIMIT.as_secs_f64(), false)?;
        let shutdown =
            self.number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", STALL_TIME_LIMIT.as_secs_f64(), false)?;
        let disabled = self.flag("HOROVOD_STALL_CHECK_DISABLE")?;
        let seconds = |value: f64| (value > 0.0).then(|| Duration::from_secs_f64(value));
        // As in Horovod, which then looks for nothing that waits.
        let never = disabled || shutdown == Some(0.0);
        Ok(Options {
            fusion_threshold: threshold.map_or(defaults.fusion_threshold, |bytes| bytes as usize),
            cycle_time: cycle.map_or(defaults.cycle_time, |millis| Duration::from_secs_f64(millis / 1e3)),
            cache_capacity: capacity.map_or(defaults.cache_capacity, |names| names as usize),
            stall_check_time: if disabled { None } else { check.map_or(defaults.stall_check_time, seconds) },
            stall_shutdown_time: if never { Some(STALL_TIME_LIMIT) } else { shutdown.and_then(seconds) },
            autotune: self.flag("HOROVOD_AUTOTUNE")?,
            // "DYNAMIC" says that the program will start one.
            timeline: self.text("HOROVOD_TIMELINE").filter(|path| path != "DYNAMIC").map(PathBuf::from),
        })
    }

    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str, most: f64, is_whole: bool) -> Result<Option<f64>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<f64>() {
            Ok(value) if (0.0..=most).contains(&value) && (!is_whole || value.fract() == 0.0) => {
                Ok(Some(value))
            }
            _ => {
                let kind = if is_whole { "a whole number" } else { "a number" };
                Err(malformed(name, &text, &format!("it must be {kind} from 0 to {most}")))
            }
        }
    }

    fn flag(&self, name: &str) -> Result<bool> {
        match self.text(name).as_deref() {
            None | Some("0") => Ok(false),
            Some("1") => Ok(true),
            Some(text) if text.eq_ignore_ascii_case("true") => Ok(true),
            Some(text) if text.eq_ignore_ascii_case("false") => Ok(false),
            Some(text) => Err(malformed(name, text, "it must be 1 or 0")),
        }
    }
}

fn malformed(name: &str, value: &str, why: &str) -> Error {
    Error::environment(format!("{name}={value:?}: {why}")).with_remedy(format!("correct {name}, or unset it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(set: &[(&str, &str)]) -> Result<Options> {
        let lookup =
            |name: &str| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Variables { lookup: &lookup }.options()
    }

    #[test]
    fn variables_change_the_defaults() {
        assert_eq!(
            options(&[("HOROVOD_CYCLE_TIME", ""), ("HOROVOD_TIMELINE", " ")]).unwrap(),
            Options::default()
        );
        let set = options(&[
            ("HOROVOD_FUSION_THRESHOLD", "33554432"),
            ("HOROVOD_CYCLE_TIME", "3.5"),
            ("HOROVOD_CACHE_CAPACITY", "0"),
            ("HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
            ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "10"),
            ("HOROVOD_AUTOTUNE", "1"),
            ("HOROVOD_TIMELINE", "t.json"),
        ]);
        let expected = Options {
            fusion_threshold: 32 << 20,
            cycle_time: Duration::from_micros(3500),
            cache_capacity: 0,
            stall_check_time: Some(Duration::from_secs(5)),
            stall_shutdown_time: Some(Duration::from_secs(10)),
            autotune: true,
            timeline: Some("t.json".into()),
        };
        assert_eq!(set.unwrap(), expected);
        assert_eq!(options(&[("HOROVOD_TIMELINE", "DYNAMIC")]).unwrap().timeline, None);
    }

    #[test]
    fn whoever_asks_for_no_end_gets_none() {
        let (shutdown, disable) = ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_DISABLE");
        let never = Options { stall_shutdown_time: Some(STALL_TIME_LIMIT), ..Options::default() };
        let neither = Options { stall_check_time: None, ..never.clone() };
        assert!(never.check().is_ok());
        for zero in ["0", "0.0", "-0"] {
            assert_eq!(options(&[(shutdown, zero)]).unwrap(), never, "{zero}");
        }
        assert_eq!(options(&[(disable, "1")]).unwrap(), neither);
        // As in Horovod: nothing is looked for.
        assert_eq!(options(&[(disable, "1"), (shutdown, "10")]).unwrap(), neither);
        // Unset, or not asked for.
        for unset in [(shutdown, ""), (disable, "0"), (disable, "")] {
            assert_eq!(options(&[unset]).unwrap(), Options::default());
        }
    }

    #[test]
    fn a_bad_value_is_an_error_that_names_the_variable() {
        let bad = [
            ("HOROVOD_FUSION_THRESHOLD", "64MB"),
            ("HOROVOD_FUSION_THRESHOLD", "1.5"),
            ("HOROVOD_CYCLE_TIME", "-1"),
            ("HOROVOD_CYCLE_TIME", "nan"),
            ("HOROVOD_CACHE_CAPACITY", "9999999999"),
            ("HOROVOD_STALL_CHECK_TIME_SECONDS", "inf"),
            ("HOROVOD_STALL_CHECK_DISABLE", "yes"),
            ("HOROVOD_AUTOTUNE", "2"),
        ];
        for (name, value) in bad {
            let error = options(&[(name, value)]).unwrap_err();
            assert!(
                error.is_environment() && error.to_string().contains(&format!("{name}={value:?}")),
                "{error}"
            );
        }
    }

    #[test]
    fn what_a_program_sets_is_checked_as_variables_are() {
        let defaults = Options::default();
        assert!(defaults.check().is_ok());
        let bad = [
            Options { fusion_threshold: usize::MAX, ..defaults.clone() },
            Options { cycle_time: Duration::from_secs(11), ..defaults.clone() },
            Options { cache_capacity: usize::MAX, ..defaults.clone() },
            Options { stall_check_time: Some(Duration::ZERO), ..defaults.clone() },
            Options { stall_shutdown_time: Some(Duration::MAX), ..defaults },
        ];
        for (options, name) in
            bad.iter().zip(["fusion_", "cycle_", "cache_", "stall_check_", "stall_shutdown_"])
        {
            let error = options.check().unwrap_err();
            assert!(error.is_invalid_argument() && error.to_string().contains(name), "{error}");
            assert!(error.remedy().is_some(), "{error}");
        }
    }

    #[test]
    fn the_page_of_variables_has_every_one() {
        let page = include_str!("../../../docs/variables.md");
        let honoured = [
            "HOROVOD_FUSION_THRESHOLD",
            "HOROVOD_CYCLE_TIME",
            "HOROVOD_CACHE_CAPACITY",
            "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "HOROVOD_STALL_CHECK_DISABLE",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "HOROVOD_AUTOTUNE",
            "HOROVOD_TIMELINE",
        ];
        for name in honoured.into_iter().chain(WITHOUT_MEANING.iter().map(|(name, _)| *name)) {
            assert!(page.contains(&format!("`{name}`")), "{name} is missing");
        }
    }

    #[test]
    fn what_has_no_meaning_is_said() {
        let said: Vec<String> = warnings(|name| name == "HOROVOD_NUM_NCCL_STREAMS").collect();
        assert_eq!(said, ["HOROVOD_NUM_NCCL_STREAMS has no meaning here: there is no NCCL"]);
    }
}
