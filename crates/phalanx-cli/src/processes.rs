//! How many workers: `--nproc-per-node`.

use std::ffi::OsString;
use std::path::Path;
use std::str::FromStr;
use std::{env, fs, thread};

use phalanx::{MAX_WORLD_SIZE, WorldSize};

const OTHER_VARIABLE: &str = "PET_N_PROC_PER_NODE";
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// NVIDIA's driver has a folder for each device here.
const DRIVER: &str = "proc/driver/nvidia/gpus";

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
        let visible = env::var_os(VISIBLE_DEVICES).map(|list| list.to_string_lossy().into_owned());
        let gpus = || gpus(Path::new("/"), visible.as_deref());
        let count = match self {
            Self::Number(size) => return Ok(size),
            Self::Cpu => cpus()?,
            Self::Gpu => match gpus() {
                0 => {
                    let given = visible.as_deref().map(|list| format!(" with {VISIBLE_DEVICES}={list}"));
                    return Err(format!(
                        "--nproc-per-node gpu: no NVIDIA GPU is visible{}; give a number, or `cpu`",
                        given.unwrap_or_default()
                    ));
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

/// The devices below `root` that a program of CUDA sees: `dev/nvidia0`, `dev/nvidia1`, .., of which `CUDA_VISIBLE_DEVICES` may name some.
fn gpus(root: &Path, visible: Option<&str>) -> usize {
    let names = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let is_gpu = |name: &&String| {
        name.strip_prefix("nvidia")
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    let present = names("dev").iter().filter(is_gpu).count();
    let Some(list) = visible else { return present };
    // The driver says the UUID of each device, once that has been used; where it does not, any is taken for that of one.
    let uuids = || {
        let files = names(DRIVER).into_iter().map(|gpu| root.join(DRIVER).join(gpu).join("information"));
        let uuids = files.map(|file| uuid(&fs::read_to_string(file).ok()?));
        uuids.collect::<Option<Vec<_>>>().unwrap_or_default()
    };
    match list.trim_start().get(..4) {
        // A program gets one instance, however many are named.
        Some("MIG-") => present.min(1),
        Some("GPU-") => {
            let uuids = uuids();
            let device = |entry: &str| match uuids.is_empty() {
                _ if !entry.starts_with("GPU-") => None,
                true => Some(entry.to_owned()),
                false => only(uuids.iter().filter(|uuid| uuid.starts_with(entry))).cloned(),
            };
            seen(list, device).min(present)
        }
        _ => seen(list, |entry| number(entry).filter(|index| *index < present)),
    }
}

/// How many devices a list names: as CUDA does, up to the first entry that is none of a device, and none if two entries are the same device.
fn seen<D: PartialEq>(list: &str, device: impl Fn(&str) -> Option<D>) -> usize {
    let mut devices = Vec::new();
    for found in list.split(',').map(|entry| device(entry.trim())) {
        match found {
            None => break,
            Some(found) if devices.contains(&found) => return 0,
            Some(found) => devices.push(found),
        }
    }
    devices.len()
}

/// The number with which an entry begins: CUDA ignores what follows it.
fn number(entry: &str) -> Option<usize> {
    let digits = entry.strip_prefix('+').unwrap_or(entry);
    let end = digits.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// The UUID in what the driver says of a device; question marks stand for one that it does not know yet.
fn uuid(information: &str) -> Option<String> {
    let uuid = information.lines().find_map(|line| line.strip_prefix("GPU UUID:"))?.trim();
    (!uuid.contains('?')).then(|| uuid.to_owned())
}

/// The only item, if there is just one: an abbreviated UUID may be that of several devices.
fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let first = items.next();
    if items.next().is_some() { None } else { first }
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

    /// A machine with three GPUs; `uuids` are what its driver says.
    fn machine(uuids: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("dev")).unwrap();
        for name in ["nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"] {
            fs::write(root.path().join("dev").join(name), "").unwrap();
        }
        for (bus, uuid) in uuids.iter().enumerate() {
            let folder = root.path().join(DRIVER).join(format!("0000:0{bus}:00.0"));
            fs::create_dir_all(&folder).unwrap();
            let information =
                format!("Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {bus}\n");
            fs::write(folder.join("information"), information).unwrap();
        }
        root
    }

    #[test]
    fn gpus_are_counted_as_cuda_sees_them() {
        let root = machine(&[]);
        let seen = |visible| gpus(root.path(), visible);
        assert_eq!((seen(None), seen(Some("1,2")), seen(Some(" 0 , 2 "))), (3, 2, 2));
        assert_eq!((seen(Some("")), seen(Some("none")), seen(Some("-1"))), (0, 0, 0));
        // Up to the first entry that is no device, also where enough others follow.
        assert_eq!((seen(Some("0,-1,1")), seen(Some("0,3,1,2")), seen(Some("5,0,1"))), (1, 1, 0));
        assert_eq!((seen(Some("0,1,")), seen(Some("0,,1")), seen(Some("0,99999999999999999999"))), (2, 1, 1));
        // The same device twice is none.
        assert_eq!(
            (seen(Some("1,1")), seen(Some("0,1,0")), seen(Some("0,00")), seen(Some("0,-1,0"))),
            (0, 0, 0, 1)
        );
        assert_eq!((seen(Some("1x,+2")), seen(Some("0,GPU-a"))), (2, 1));
        assert_eq!(gpus(Path::new("/nonexistent"), None), 0);
        assert_eq!(gpus(Path::new("/nonexistent"), Some("0,1")), 0);
    }

    #[test]
    fn gpus_are_counted_by_their_uuids() {
        let root = machine(&["GPU-12ab-01", "GPU-12cd-02", "GPU-77ef-03"]);
        let seen = |visible| gpus(root.path(), Some(visible));
        assert_eq!((seen("GPU-77ef-03,GPU-12ab-01"), seen("GPU-77,GPU-12a")), (2, 2));
        // An unknown one, one that may be two, and one that is named twice.
        assert_eq!((seen("GPU-77,GPU-ff,GPU-12a"), seen("GPU-12"), seen("GPU-77,GPU-77ef-03")), (1, 0, 0));
        assert_eq!((seen("GPU-77,0"), seen("MIG-a,MIG-b"), seen("MIG-GPU-12ab-01/1/0")), (1, 1, 1));
        let one = machine(&["GPU-12ab-01"]);
        assert_eq!(gpus(one.path(), Some("GPU-12ab-01,")), 1);
        // Where the driver says nothing, or nothing yet of a device that nobody has used.
        for root in [machine(&[]), machine(&["GPU-12ab-01", "GPU-????????-????", "GPU-????????-????"])] {
            let seen = |visible| gpus(root.path(), Some(visible));
            assert_eq!(
                (seen("GPU-a,GPU-b"), seen("GPU-a,GPU-a"), seen("GPU-a,0"), seen("GPU-a,GPU-b,GPU-c,GPU-d")),
                (2, 0, 1, 3)
            );
        }
        assert_eq!(gpus(Path::new("/nonexistent"), Some("MIG-a")), 0);
    }
}
