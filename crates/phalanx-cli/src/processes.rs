//! How many workers: `--nproc-per-node`.

use std::ffi::OsString;
use std::path::Path;
use std::str::FromStr;
use std::{env, fs, thread};

use phalanx::{MAX_WORLD_SIZE, WorldSize};

const OTHER_VARIABLE: &str = "PET_N_PROC_PER_NODE";

/// A number of workers, or the devices that get one worker each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Processes {
    Number(WorldSize),
    Cpu,
    Gpu,
    Auto,
}

/// What is said of a number of workers that no job has.
pub(crate) fn out_of_range() -> String {
    format!("give a number of workers from 1 to {MAX_WORLD_SIZE}")
}

impl FromStr for Processes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "cpu" => Ok(Self::Cpu),
            "gpu" => Ok(Self::Gpu),
            "auto" => Ok(Self::Auto),
            _ => {
                let number: i64 =
                    text.parse().map_err(|_| "it is neither a number nor cpu, gpu or auto".to_owned())?;
                let size = u32::try_from(number).ok().and_then(|number| WorldSize::new(number).ok());
                size.map(Self::Number).ok_or_else(out_of_range)
            }
        }
    }
}

impl Processes {
    /// torchrun accepts this name as well, for Kubernetes.
    pub(crate) fn from_other_variable() -> Result<Option<Self>, String> {
        Self::from_value(env::var_os(OTHER_VARIABLE))
    }

    /// An empty variable counts as not set, as those of the options.
    fn from_value(value: Option<OsString>) -> Result<Option<Self>, String> {
        let Some(value) = value.filter(|value| !value.is_empty()) else { return Ok(None) };
        let text = value.to_string_lossy();
        text.parse().map(Some).map_err(|error| format!("{OTHER_VARIABLE}={text}: {error}"))
    }

    /// The number of workers on this machine.
    pub(crate) fn count(self) -> Result<WorldSize, String> {
        let gpus = || gpus(Path::new("/dev"), env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let count = match self {
            Self::Number(size) => return Ok(size),
            Self::Cpu => cpus()?,
            Self::Gpu => match gpus() {
                0 => {
                    return Err(
                        "--nproc-per-node gpu: no NVIDIA GPU is visible; give a number, or `cpu`".to_owned()
                    );
                }
                count => count,
            },
            Self::Auto => match gpus() {
                0 => cpus()?,
                count => count,
            },
        };
        WorldSize::new(count.try_into().unwrap_or(u32::MAX)).map_err(|error| error.to_string())
    }
}

/// Processors that this process may use: its affinity and its cgroup count.
fn cpus() -> Result<usize, String> {
    match thread::available_parallelism() {
        Ok(count) => Ok(count.get()),
        Err(error) => Err(format!("the number of processors is not known ({error}); give a number")),
    }
}

/// `nvidia0`, `nvidia1`, .. in `devices`, if `CUDA_VISIBLE_DEVICES` makes them visible.
fn gpus(devices: &Path, visible: Option<&str>) -> usize {
    let is_gpu = |name: &str| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let present = fs::read_dir(devices).map_or(0, |entries| {
        entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_gpu)).count()
    });
    match visible {
        None => present,
        // CUDA stops at the first invalid entry, usually -1.
        Some(list) => {
            let named =
                list.split(',').map(str::trim).take_while(|entry| !entry.is_empty() && *entry != "-1");
            named.count().min(present)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_numbers() {
        assert_eq!("auto".parse(), Ok(Processes::Auto));
        assert_eq!("3".parse::<Processes>().unwrap().count().unwrap().get(), 3);
        for bad in ["", "0", "-1", "many", "4294967296", "70000"] {
            assert!(bad.parse::<Processes>().is_err(), "{bad}");
        }
        for bad in ["0", "-1", "70000"] {
            assert_eq!(bad.parse::<Processes>(), Err("give a number of workers from 1 to 65536".to_owned()));
        }
        assert!(Processes::Cpu.count().unwrap().get() >= 1);
    }

    #[test]
    fn an_empty_variable_counts_as_not_set() {
        let of = |value: Option<&str>| Processes::from_value(value.map(OsString::from));
        assert_eq!(
            (of(None), of(Some("")), of(Some("auto"))),
            (Ok(None), Ok(None), Ok(Some(Processes::Auto)))
        );
        let error = of(Some("many")).unwrap_err();
        assert!(error.starts_with("PET_N_PROC_PER_NODE=many: it is neither a number"), "{error}");
    }

    #[test]
    fn gpus_are_counted_as_cuda_sees_them() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(gpus(folder.path(), None), 3);
        assert_eq!(gpus(folder.path(), Some("1,2")), 2);
        assert_eq!(gpus(folder.path(), Some("")), 0);
        assert_eq!(gpus(folder.path(), Some("0,-1,1")), 1);
        assert_eq!(gpus(Path::new("/nonexistent"), None), 0);
    }
}
