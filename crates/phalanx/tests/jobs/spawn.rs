//! `phalanx::spawn` with real processes. This program runs itself once for each scenario, and looks at what comes out.

use std::io::{BufRead, BufReader, Read};
use std::ops::ControlFlow;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use phalanx::WorldSize;
use phalanx::launch::{Event, Job, Outcome};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::harness::ROLE;
use crate::support::world::without_reminders;

const LIMIT: Duration = Duration::from_secs(20);
/// The rank that fails in `train`, how, and of how many.
const CULPRIT: &str = "TEST_CULPRIT";
const HOW: &str = "TEST_HOW";
const WORLD: &str = "TEST_WORLD";

pub const TESTS: &[(&str, fn())] = &[
    ("success", success),
    ("an_error_names_rank_and_message", an_error_names_rank_and_message),
    ("an_exit_code_is_reported", an_exit_code_is_reported),
    ("a_panic_is_reported", a_panic_is_reported),
    ("a_killed_worker_is_named", a_killed_worker_is_named),
    ("who_failed_first_is_named_however_it_failed", who_failed_first_is_named_however_it_failed),
    ("lines_of_two_ranks_do_not_run_together", lines_of_two_ranks_do_not_run_together),
    ("grandchildren_are_ended", grandchildren_are_ended),
    ("daemons_are_ended", daemons_are_ended),
    ("the_parents_death_ends_daemons", the_parents_death_ends_daemons),
    ("the_parents_death_ends_all", the_parents_death_ends_all),
    ("ctrl_c_ends_all", ctrl_c_ends_all),
    ("other_signals_that_end_a_program_end_all", other_signals_that_end_a_program_end_all),
    ("a_signal_that_the_program_ignores_ends_the_workers_alone", an_ignored_signal_ends_the_workers),
    ("calls_are_told_apart", calls_are_told_apart),
    ("ranks_that_leave_after_other_calls_fail_the_job", ranks_that_leave_after_other_calls_fail_the_job),
    ("who_leaves_well_fails_no_job", who_leaves_well_fails_no_job),
    ("misuse_is_refused", misuse_is_refused),
    ("under_a_launcher_the_worker_runs_in_place", under_a_launcher_the_worker_runs_in_place),
    ("an_unknown_launcher_is_said", an_unknown_launcher_is_said),
    ("tests_that_a_launcher_has_started_are_no_ranks", tests_that_a_launcher_has_started_are_no_ranks),
    ("a_deleted_program_still_spawns", a_deleted_program_still_spawns),
    (
        "an_observer_that_asks_late_for_the_end_starts_nobody_again",
        an_observer_that_asks_late_for_the_end_starts_nobody_again,
    ),
];

/// The program under test: what `spawn` returns goes to standard output.
/// What this program does as one that spawns.
pub fn play(scenario: &str) {
    let rank = || std::env::var("RANK").unwrap();
    let only = |who: &str| {
        if rank() != who {
            wait_for_ever();
        }
    };
    let result = match scenario {
        "success" => phalanx::spawn(3, || -> Result<(), String> {
            let of = |name| std::env::var(name).unwrap();
            let arguments: Vec<String> = std::env::args().skip(1).collect();
            assert!(!of("MASTER_PORT").is_empty() && std::io::stdin().read(&mut [0]).unwrap() == 0);
            println!("{}/{} {} {arguments:?}", rank(), of("WORLD_SIZE"), of("TORCHELASTIC_USE_AGENT_STORE"));
            Ok(())
        }),
        "error" => phalanx::spawn(2, || {
            only("1");
            Err("no data")
        }),
        "exit" => phalanx::spawn(3, || -> Result<(), String> {
            only("2");
            std::process::exit(7)
        }),
        "panic" => phalanx::spawn(2, || -> Result<(), String> {
            only("0");
            panic!("index {} is too large", 9)
        }),
        "kill" => phalanx::spawn(2, || -> Result<(), String> {
            only("1");
            kill_process(getpid(), Signal::KILL).unwrap();
            wait_for_ever()
        }),
        "grandchild" => phalanx::spawn(1, || -> Result<(), String> {
            println!("{}", Command::new("sleep").arg("60").spawn().unwrap().id());
            Ok(())
        }),
        "endless" => phalanx::spawn(2, || -> Result<(), String> {
            println!("{}", Command::new("sleep").arg("60").spawn().unwrap().id());
            println!("{}", std::process::id());
            wait_for_ever()
        }),
        "culprit" => phalanx::spawn(std::env::var(WORLD).unwrap().parse().unwrap(), train),
        "leave" => phalanx::spawn(2, leave),
        "both" => phalanx::spawn(2, || Err("x".repeat(2000))),
        "daemon" => phalanx::spawn(1, || -> Result<(), String> {
            println!("{}", daemon());
            Ok(())
        }),
        "endless_daemon" => phalanx::spawn(2, || -> Result<(), String> {
            println!("{}\n{}", daemon(), std::process::id());
            wait_for_ever()
        }),
        "two" => {
            for round in 1..=2 {
                phalanx::spawn(2, || -> Result<(), String> {
                    println!("round {round}");
                    Ok(())
                })
                .unwrap();
            }
            phalanx::spawn(1, || Err("the third"))
        }
        "nested" => phalanx::spawn(1, || phalanx::spawn(1, || Err("must not run"))),
        "none" => phalanx::spawn(0, || Err("must not run")),
        other => panic!("no scenario {other}"),
    };
    match result {
        Ok(()) => println!("Ok"),
        Err(error) => {
            println!(
                "worker_failure={} peer={:?} {error}",
                error.is_worker_failure(),
                error.peer().map(|p| p.get())
            );
        }
    }
}

fn wait_for_ever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(60));
    }
}

fn success() {
    let (status, out, _) = run(program("success").args(["--epochs", "3"]));
    assert!(status.success());
    let mut lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.pop(), Some("Ok"));
    lines.sort_unstable();
    let arguments = r#"["--epochs", "3"]"#;
    assert_eq!(lines, (0..3).map(|rank| format!("{rank}/3 True {arguments}")).collect::<Vec<_>>());
}

fn an_error_names_rank_and_message() {
    let (_, out, err) = run(&mut program("error"));
    assert!(out.starts_with("worker_failure=true peer=Some(1) rank 1 (pid "), "{out}");
    assert!(out.trim_end().ends_with("failed: exit code 1: no data"), "{out}");
    assert_eq!(err, "rank 1: no data\n");
}

fn an_exit_code_is_reported() {
    let (_, out, _) = run(&mut program("exit"));
    assert!(out.contains("peer=Some(2)") && out.contains("exit code 7"), "{out}");
}

fn a_panic_is_reported() {
    let (_, out, err) = run(&mut program("panic"));
    assert!(out.contains("peer=Some(0)"), "{out}");
    assert!(out.contains("exit code 101: panicked at ") && out.contains(": index 9 is too large"), "{out}");
    assert!(err.contains("index 9 is too large"));
}

fn a_killed_worker_is_named() {
    let (_, out, _) = run(&mut program("kill"));
    assert!(out.contains("peer=Some(1)") && out.contains("killed by SIGKILL"), "{out}");
}

/// A process in a session of its own.
fn daemon() -> u32 {
    Command::new("setsid").args(["sleep", "60"]).spawn().unwrap().id()
}

/// Trains until rank `CULPRIT` ends `HOW`.
fn train() -> phalanx::Result<()> {
    let group = phalanx::init()?;
    let (culprit, how) = (std::env::var(CULPRIT).unwrap(), std::env::var(HOW).unwrap());
    let mut data = vec![1.0_f32; 1000];
    for step in 0.. {
        if step == 5 && group.rank().to_string() == culprit {
            match how.as_str() {
                "panic" => panic!("no such sample"),
                "error" => return Err(phalanx::Error::aborted("no data")),
                "abort" => std::process::abort(),
                other => panic!("no way {other}"),
            }
        }
        group.all_reduce(&mut data, phalanx::ReduceOp::Avg)?;
    }
    Ok(())
}

/// Two ranks, each as on a host of its own, whose last call is a broadcast.
fn leave() -> phalanx::Result<()> {
    let own: u32 = std::env::var("RANK").unwrap().parse().unwrap();
    if std::env::var_os("PHALANX_HOST_ID").is_none() {
        let mut again = Command::new(std::env::current_exe().unwrap());
        panic!("{}", again.env("PHALANX_HOST_ID", format!("host {own}")).exec());
    }
    let group = phalanx::init()?;
    let own = group.rank();
    let mut data = [own.get() as f32; 4];
    group.all_reduce(&mut data, phalanx::ReduceOp::Sum)?;
    match std::env::var(HOW).unwrap().as_str() {
        "return" => group.broadcast(&mut data, own)?,
        "exit" => {
            group.broadcast(&mut data, own)?;
            drop(group);
            std::process::exit(0);
        }
        "dropped work" => drop(group.broadcast_async(group.alloc(phalanx::DType::F32, 4)?, own)?),
        "another handle" => {
            group.broadcast(&mut data, own)?;
            let other = group.clone();
            drop(group);
            return other.leave();
        }
        // Rank 0 makes a call that rank 1 does not make.
        "missing" if own.is_main() => group.broadcast(&mut data, own)?,
        "missing" => {}
        "late" => {
            group.broadcast(&mut data, own)?;
            // It is busy when rank 0 leaves.
            std::thread::sleep(Duration::from_secs(u64::from(own.get())));
        }
        "well" => group.broadcast(&mut data, phalanx::Rank::MAIN)?,
        "well, dropped" => {
            drop(group.broadcast_async(group.alloc(phalanx::DType::F32, 4)?, phalanx::Rank::MAIN)?)
        }
        "heard" => {
            // The first of these calls tells it to a rank that is behind the other one.
            let outcome = group.broadcast(&mut data, own).and_then(|()| group.barrier());
            assert!(outcome.unwrap_err().is_mismatch());
        }
        "well, late" => {
            group.broadcast(&mut data, phalanx::Rank::new(1))?;
            std::thread::sleep(Duration::from_secs(u64::from(own.get())));
        }
        // Rank 1 ends before a call of rank 0.
        "error" if own.is_main() => group.broadcast(&mut data, own)?,
        "error" => return Err(phalanx::Error::aborted("no data")),
        "kill" if own.is_main() => group.broadcast(&mut data, own)?,
        "kill" => kill_process(getpid(), Signal::KILL).unwrap(),
        other => panic!("no way {other}"),
    }
    Ok(())
}

fn ranks_that_leave_after_other_calls_fail_the_job() {
    let both = "rank 0 calls broadcast(4 x f32, root 0) #1, rank 1 calls broadcast(4 x f32, root 1) #1";
    for how in ["return", "exit", "dropped work", "another handle", "late", "missing"] {
        let (_, out, err) = run(program("leave").env(HOW, how));
        assert!(out.starts_with("worker_failure=true"), "{how}: {out}{err}");
        let reversed =
            "rank 1 calls broadcast(4 x f32, root 1) #1, rank 0 calls broadcast(4 x f32, root 0) #1";
        let says = |text: &str| text.contains(both) || text.contains(reversed) || how == "missing";
        assert!(says(&out) && says(&err), "{how}: {out}{err}");
        // The launcher may end one of them before it has said it.
        assert!(err.contains("#1"), "{how}: {err}");
    }
    let (_, out, _) = run(program("leave").env(HOW, "error"));
    assert!(out.contains("peer=Some(1)") && out.contains("no data"), "{out}");
    let (_, out, _) = run(program("leave").env(HOW, "kill"));
    assert!(out.contains("peer=Some(1)") && out.contains("SIGKILL"), "{out}");
}

fn who_leaves_well_fails_no_job() {
    for how in ["well", "well, dropped", "well, late", "heard"] {
        let (_, out, err) = run(program("leave").env(HOW, how));
        assert_eq!(out, "Ok\n", "{how}: {err}");
        assert_eq!(without_reminders(&err), "", "{how}");
    }
}

fn who_failed_first_is_named_however_it_failed() {
    let runs =
        [(2, 40), (4, 20)].into_iter().flat_map(|(world, runs)| (0..runs).map(move |run| (world, run)));
    for (world, number) in runs {
        let ways = [("panic", "no such sample"), ("error", "no data"), ("abort", "killed by SIGABRT")];
        let ((how, words), culprit) = (ways[number % 3], number % world);
        let mut program = program("culprit");
        program.env(CULPRIT, culprit.to_string()).env(HOW, how).env(WORLD, world.to_string());
        let (_, out, err) = run(&mut program);
        assert!(out.contains(&format!("peer=Some({culprit})")) && out.contains(words), "{how}: {out}{err}");
        // `Error: ..` of the program itself may be longer; a panic's place is there once.
        assert_eq!(out.matches("spawn.rs:").count(), usize::from(how == "panic"), "{out}");
    }
}

fn lines_of_two_ranks_do_not_run_together() {
    for _ in 0..5 {
        let (_, _, err) = run(&mut program("both"));
        let line = |line: &str| line.len() == "rank 0: ".len() + 2000 && line.starts_with("rank ");
        // The launcher may end one of them before it has said anything.
        assert!(!err.is_empty() && err.lines().all(line), "{err}");
    }
}

fn daemons_are_ended() {
    let (_, out, _) = run(&mut program("daemon"));
    let (pid, result) = out.trim_end().split_once('\n').unwrap();
    assert_eq!(result, "Ok");
    assert!(is_gone(pid), "{pid} was left behind");
}

fn the_parents_death_ends_daemons() {
    let (mut parent, _out, pids) = start_endless(&mut program("endless_daemon"));
    kill_process(Pid::from_child(&parent), Signal::KILL).unwrap();
    wait(&mut parent);
    wait_until_gone(&pids);
}

fn grandchildren_are_ended() {
    let (_, out, _) = run(&mut program("grandchild"));
    let (pid, result) = out.trim_end().split_once('\n').unwrap();
    assert_eq!(result, "Ok");
    assert!(is_gone(pid), "{pid} was left behind");
}

fn the_parents_death_ends_all() {
    end_the_parent(Signal::KILL);
}

fn ctrl_c_ends_all() {
    end_the_parent(Signal::INT);
}

fn other_signals_that_end_a_program_end_all() {
    [Signal::TERM, Signal::HUP].into_iter().for_each(end_the_parent);
}

fn an_ignored_signal_ends_the_workers() {
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' INT; exec \"$0\""]).arg(std::env::current_exe().unwrap());
    prepare(&mut shell, "endless");
    let (mut parent, mut out, pids) = start_endless(&mut shell);
    kill_process(Pid::from_child(&parent), Signal::INT).unwrap();
    let mut rest = String::new();
    out.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("SIGINT ended the workers"), "{rest}");
    assert!(wait(&mut parent).success());
    wait_until_gone(&pids);
}

fn end_the_parent(signal: Signal) {
    // With the signals as a terminal has them: the tests may run in the background or behind `nohup`, where some are ignored.
    let mut program = Command::new("env");
    program.arg("--default-signal=INT,TERM,HUP").arg(std::env::current_exe().unwrap());
    prepare(&mut program, "endless");
    // What the program might still say must not meet a closed pipe, of which it would die first.
    let (mut parent, _out, pids) = start_endless(&mut program);
    kill_process(Pid::from_child(&parent), signal).unwrap();
    assert_eq!(wait(&mut parent).signal(), Some(signal.as_raw()));
    wait_until_gone(&pids);
}

/// Starts the program, and reads the numbers of the four processes that it starts.
fn start_endless(program: &mut Command) -> (Child, BufReader<ChildStdout>, Vec<String>) {
    let mut parent = program.stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(parent.stdout.take().unwrap());
    let pids: Vec<String> = out.by_ref().lines().take(4).map(Result::unwrap).collect();
    assert!(pids.iter().all(|pid| !is_gone(pid)), "{pids:?}");
    (parent, out, pids)
}

fn wait_until_gone(pids: &[String]) {
    let deadline = Instant::now() + LIMIT;
    while let Some(pid) = pids.iter().find(|pid| !is_gone(pid)) {
        assert!(Instant::now() < deadline, "{pid} was left behind");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn calls_are_told_apart() {
    let (_, out, _) = run(&mut program("two"));
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[..4], ["round 1", "round 1", "round 2", "round 2"]);
    assert!(lines[4].ends_with("the third") && lines.len() == 5, "{out}");
}

fn misuse_is_refused() {
    let (_, out, _) = run(&mut program("none"));
    assert!(out.contains("world size of 0"), "{out}");
    let (_, out, _) = run(&mut program("nested"));
    assert!(out.contains("inside a worker") && out.contains("call spawn in main"), "{out}");
    let (_, out, _) = run(program("success").env("RANK", "3"));
    assert!(out.contains("WORLD_SIZE"), "{out}");
    let inherited = |name| match name {
        "RANK" => "0",
        "WORLD_SIZE" => "1",
        "MASTER_ADDR" => "127.0.0.1",
        "MASTER_PORT" => "29500",
        _ => "1:1:elsewhere",
    };
    let names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PHALANX_SPAWN"];
    let (_, out, _) = run(program("success").envs(names.map(|name| (name, inherited(name)))));
    assert!(out.contains("started by a worker of spawn"), "{out}");
}

fn under_a_launcher_the_worker_runs_in_place() {
    let launched = |scenario| {
        let mut program = program(scenario);
        program.envs([
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ]);
        run(&mut program)
    };
    let (status, out, err) = launched("error");
    assert_eq!((status.code(), out.as_str()), (Some(1), ""));
    assert!(err.contains("rank 1: no data"), "{err}");
    let (status, _, err) = launched("nested");
    assert!(status.code() == Some(1) && err.contains("inside a worker"), "{err}");
}

fn an_unknown_launcher_is_said() {
    for (rank, warnings) in [("0", 0), ("1", 1)] {
        let (status, _, err) = run(program("success").env("SOME_LAUNCHERS_RANK", rank));
        let said =
            err.matches("warning: SOME_LAUNCHERS_RANK=1 looks like a rank, but its launcher is not known");
        assert!(status.success() && said.count() == warnings, "{rank}: {err}");
    }
}

/// As in an interactive step of Slurm.
fn tests_that_a_launcher_has_started_are_no_ranks() {
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["--exact", "spawn::success"]).env("SLURM_PROCID", "1").env("SLURM_STEP_NUM_TASKS", "2");
    let (status, out, err) = run(&mut tests);
    assert!(status.success() && out.contains("1 passed"), "{out}{err}");
}

fn a_deleted_program_still_spawns() {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("program");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    // Gone from the disk before it starts, but for the open descriptor.
    let mut command = Command::new("sh");
    command
        .args(["-c", "exec 3<\"$0\"; rm \"$0\"; exec /proc/self/fd/3"])
        .arg(&copy)
        .env(ROLE, "spawn::exit");
    let (_, out, err) = run(&mut command);
    assert!(out.contains("exit code 7"), "{out}{err}");
}

fn program(scenario: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    prepare(&mut command, scenario);
    command
}

fn prepare(command: &mut Command, scenario: &str) {
    command.env(ROLE, format!("spawn::{scenario}")).stdin(Stdio::null());
}

/// Runs it to its end: exit status, standard output, standard error.
fn run(command: &mut Command) -> (ExitStatus, String, String) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let read = |mut stream: Box<dyn Read + Send>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            stream.read_to_string(&mut text).map(|_| text).unwrap()
        })
    };
    let (out, err) = (read(Box::new(out)), read(Box::new(err)));
    let status = wait(&mut child);
    (status, out.join().unwrap(), err.join().unwrap())
}

fn wait(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            panic!("it did not end within {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether there is no such process, or only its zombie.
fn is_gone(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).map_or(true, |stat| stat.contains(") Z "))
}

/// While the workers are being ended for a restart, and when they are about to start again.
fn an_observer_that_asks_late_for_the_end_starts_nobody_again() {
    for is_before in [true, false] {
        let job = Job::new("sh", WorldSize::new(2).unwrap())
            .arguments(["-c", "[ $RANK = 1 ] && exit 3; exec sleep 600"])
            .max_restarts(5);
        let mut started = 0;
        let report = job.run(&mut |event: Event<'_>| {
            started += u32::from(matches!(event, Event::Started { .. }));
            match event {
                Event::Ending { .. } if is_before => ControlFlow::Break(()),
                Event::Restarting { .. } if !is_before => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        let outcome = report.unwrap().outcome;
        assert!(matches!(outcome, Outcome::Stopped), "{outcome:?}");
        assert_eq!(started, 2);
    }
}
