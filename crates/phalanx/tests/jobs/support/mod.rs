//! The harness of tests whose program must be able to start itself as something else.

pub mod network;
pub mod world;

use std::process::{Command, Stdio};
use std::sync::RwLock;

use libtest_mimic::{Arguments, Trial};

/// Why a test is shown as ignored.
const PRIVILEGED: &str = "needs root: .ci/full";

/// Tests, named by their file as in an ordinary harness.
#[derive(Default)]
pub struct Tests(Vec<Trial>);

impl Tests {
    pub fn add(&mut self, file: &str, tests: &[(&str, fn())]) {
        self.0.extend(tests.iter().map(|test| trial(file, *test, false)));
    }

    /// Adds tests that need root and its tools: they are shown as ignored unless they are asked for, and fail where they are
    /// asked for and cannot run. They change the machine, so each runs alone.
    pub fn add_privileged(&mut self, file: &str, tests: &[(&str, fn())]) {
        self.0.extend(
            tests.iter().map(|test| trial(file, *test, true).with_ignored_flag(true).with_kind(PRIVILEGED)),
        );
    }

    /// Runs them, each in a process of its own: they count descriptors, threads, children and memory of the process that they
    /// are in. Two run at once for each processor, since most of them wait most of the time; those that keep the processors
    /// busy run alone.
    pub fn run(self) -> ! {
        let mut arguments = Arguments::from_args();
        if std::env::var_os(ALONE).is_some() {
            arguments.test_threads = Some(1);
        }
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        arguments.test_threads.get_or_insert(2 * processors);
        libtest_mimic::run(&arguments, self.0).exit()
    }
}

/// Set in the process of one test.
const ALONE: &str = "PHALANX_TEST_ALONE";
/// What loads the machine, or is to take no longer than on an idle one: nothing else runs beside it.
const DEMANDING: [&str; 3] =
    ["strangers::", "hostile::", "frozen::nobody_is_accused_on_a_machine_that_is_busy"];

fn trial(file: &str, (name, test): (&str, fn()), has_the_machine: bool) -> Trial {
    static BESIDE_OTHERS: RwLock<()> = RwLock::new(());
    let name = format!("{file}::{name}");
    Trial::test(name.clone(), move || {
        if std::env::var_os(ALONE).is_some() {
            test();
            return Ok(());
        }
        let is_demanding = has_the_machine || DEMANDING.iter().any(|demanding| name.starts_with(demanding));
        let _alone = is_demanding.then(|| BESIDE_OTHERS.write().unwrap());
        let _beside = (!is_demanding).then(|| BESIDE_OTHERS.read().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &name, "--include-ignored"]).env(ALONE, "1");
        if std::env::args().any(|argument| argument == "--nocapture") {
            command.arg("--nocapture").stdout(Stdio::inherit()).stderr(Stdio::inherit());
        }
        let output = command.stdin(Stdio::null()).output().unwrap();
        if output.status.success() {
            return Ok(());
        }
        let [out, err] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        Err(format!("{}\n{out}{err}", output.status).into())
    })
}
